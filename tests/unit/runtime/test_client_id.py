"""Client ids, which are one tenant's, whoever looks at them; random names, each of which is given once."""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.base.client_id import draw_client_id, is_client_of
from runtime.base.random_ids import NUM_DRAWN, random_id

SECRET = b"s" * 32


@pytest.mark.parametrize(("index", "count"), [(0, 1), (1, 2), (63, 64)])
def test_an_id_says_which_detokenizer_and_whose_it_is(index: int, count: int) -> None:
    for tenant in ("", "alice", "bob"):
        ids = {draw_client_id(tenant, SECRET, index, count) for _ in range(50)}
        assert len(ids) == 50, "false alarm with a probability below 1e-6"
        for client in ids:
            assert 0 < client < 1 << 63
            assert client % count == index
            whose = [name for name in ("", "alice", "bob") if is_client_of(client, name, SECRET)]
            assert whose == [tenant]
            assert not is_client_of(client, tenant, b"t" * 32)


def test_an_id_that_is_changed_or_made_up_is_nobodys() -> None:
    rng = random.Random(1)
    client = draw_client_id("alice", SECRET)
    changed = [client ^ 1 << bit for bit in range(63)]
    made_up = [rng.randrange(1 << 63) for _ in range(1000)]
    found = [
        name for each in (0, *changed, *made_up) for name in ("", "alice") if is_client_of(each, name, SECRET)
    ]
    assert found == [], "false alarm with a probability below 1e-6"


def test_each_is_given_once_whoever_draws() -> None:
    with ThreadPoolExecutor(8) as threads:
        drawn = list(threads.map(lambda _: random_id(), range(20 * NUM_DRAWN)))
    assert len(set(drawn)) == len(drawn)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in drawn)


def test_a_child_does_not_give_those_of_its_parent() -> None:
    random_id()  # more are drawn by now
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        os.write(theirs, random_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 64).decode() not in {random_id() for _ in range(NUM_DRAWN)}
    os.close(ours)
    os.close(theirs)
