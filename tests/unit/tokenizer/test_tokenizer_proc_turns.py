"""tokenizer_proc.turns: how long a tenant waits for what others have sent."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from tokenizer_proc.turns import Turns


def test_what_one_has_sent_is_waited_for_by_itself() -> None:
    turns: Turns[str] = Turns()
    for number in range(1000):
        turns.push("flood", f"f{number}", 100)
    taken = [turns.pop() for _ in range(10)]
    turns.push("one", "o0", 1)
    turns.push("other", "x0", 10_000)
    taken += [turns.pop() for _ in range(4)]
    assert taken[:10] == [f"f{number}" for number in range(10)]
    assert sorted(taken[10:13]) == ["f10", "o0", "x0"]
    assert taken[13] == "f11"


def test_who_has_had_much_work_done_saves_nothing_by_going_away() -> None:
    turns: Turns[str] = Turns()
    turns.push("a", "large", 1000)
    turns.push("b", "b0", 10)
    assert [turns.pop(), turns.pop()] == ["large", "b0"]
    turns.push("a", "again", 1)
    for number in range(1, 200):
        turns.push("b", f"b{number}", 10)
    order = [turns.pop() for _ in range(200)]
    assert 95 <= order.index("again") <= 100


def test_who_is_held_keeps_what_waits_and_is_served_level_with_the_others_again() -> None:
    turns: Turns[str] = Turns()
    for number in range(4):
        turns.push("a", f"a{number}", 10)
        turns.push("b", f"b{number}", 10)
    assert [turns.pop(), turns.pop()] == ["a0", "b0"]
    turns.hold("a")
    turns.hold("a")
    turns.push("a", "a4", 10)
    turns.hold("c")
    turns.push("c", "c0", 10)
    assert turns.peek() == "b1"
    assert [turns.pop() for _ in range(3)] == ["b1", "b2", "b3"]
    assert not turns.is_ready
    assert (len(turns), turns.num_of("a"), turns.cost_of("a"), turns.total_cost) == (5, 4, 40, 50)
    with pytest.raises(IndexError):
        turns.pop()
    turns.push("b", "b4", 10)
    turns.push("b", "b5", 10)
    for name in ("a", "c", "a", "nobody"):
        turns.release(name)
    order = [turns.pop() for _ in range(7)]
    assert [item for item in order if item[0] == "a"] == ["a1", "a2", "a3", "a4"]
    assert sorted(order[:3]) == ["a1", "b4", "c0"], "one has saved up turns"
    assert (len(turns), turns.is_ready) == (0, False)
    # Held while it has nothing, and released.
    turns.hold("a")
    turns.release("a")
    turns.push("a", "a5", 1)
    assert turns.pop() == "a5"


def test_order_cost_and_fairness_hold_for_any_traffic() -> None:
    rng = random.Random(4)
    for _ in range(50):
        turns: Turns[tuple[str, int, int]] = Turns()
        largest = rng.choice([1, 10, 1000])
        numbers: Counter[str] = Counter()
        waiting: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
        served: Counter[str] = Counter()
        busy_since: dict[str, dict[str, int]] = {}
        for _ in range(400):
            tenant = rng.choice("aaaaaabcd")
            if rng.random() < 0.55:
                item = (tenant, numbers[tenant], rng.randint(1, largest))
                numbers[tenant] += 1
                if not waiting[tenant]:
                    busy_since[tenant] = dict(served)
                waiting[tenant].append(item)
                turns.push(tenant, item, item[2])
            elif len(turns):
                taken = turns.pop()
                assert waiting[taken[0]].pop(0) == taken, "not in the order of its tenant"
                served[taken[0]] += taken[2]
            assert len(turns) == sum(map(len, waiting.values()))
            assert turns.total_cost == sum(item[2] for items in waiting.values() for item in items)
            for name, items in waiting.items():
                assert turns.cost_of(name) == sum(item[2] for item in items)
                assert turns.num_of(name) == len(items)
                if not items:
                    continue
                # While it has something waiting, nobody gets more than it does, but for what is in work.
                own = served[name] - busy_since[name].get(name, 0)
                for other in served:
                    theirs = served[other] - busy_since[name].get(other, 0)
                    had_before = busy_since[name].get(name, 0)
                    assert theirs <= own + had_before + 2 * largest


def test_nothing_waits_in_an_empty_one() -> None:
    turns: Turns[str] = Turns()
    with pytest.raises(IndexError):
        turns.pop()
    assert not turns
    assert list(turns.items()) == []
