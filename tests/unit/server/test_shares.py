"""How tenants divide what there is of something: one that takes all it can leaves some for the next."""

from __future__ import annotations

import random

import pytest

from carousel.server.tenancy.shares import Shares


def fill(shares: Shares, tenant: str, amount: int = 1) -> int:
    """Take as much as the tenant gets; how much it has then."""
    while shares.has_room(amount) and shares.may_have(tenant, amount):
        shares.take(tenant, amount)
    return shares.of(tenant)


def test_the_only_tenant_may_have_all() -> None:
    shares = Shares(100, lambda: False, 60)
    assert shares.most == fill(shares, "alice") == shares.total == 100


def test_of_several_each_leaves_some_for_the_next() -> None:
    shares = Shares(160, lambda: True)
    assert shares.most == 120
    assert [fill(shares, name) for name in "abcd"] == [120, 30, 8, 2]
    assert not shares.may_have("a", 1)
    shares.give_back("a", 60)
    assert fill(shares, "b") > 30, "what others give back is there for it"
    assert shares.has_room(10)


def test_a_share_has_room_for_what_is_taken_at_once_as_for_one_by_one() -> None:
    for amount in (2, 7, 30):
        once, by_one = (Shares(160, lambda: True) for _ in range(2))
        fill(by_one, "a")
        assert by_one.of("a") - amount < fill(once, "a", amount) <= by_one.of("a")


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_without_room_while_there_is_some(seed: int) -> None:
    """Tenants take and give back at random; whoever has nothing may always have one of what is free."""
    rng = random.Random(seed)
    shares = Shares(rng.randint(8, 200), lambda: True)
    for _ in range(2000):
        tenant, amount = rng.choice("abcde"), rng.randint(1, 4)
        if rng.random() < 0.6 and shares.has_room(amount) and shares.may_have(tenant, amount):
            shares.take(tenant, amount)
        elif shares.of(tenant) >= amount:
            shares.give_back(tenant, amount)
        assert shares.total == sum(map(shares.of, "abcde")) <= shares.size
        assert max(map(shares.of, "abcde")) <= shares.most
        assert shares.may_have("nobody", 1) == shares.has_room(1)
