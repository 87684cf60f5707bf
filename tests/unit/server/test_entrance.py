"""How much the HTTP server does in one turn of its event loop: requests that begin, pieces of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest

from carousel.server.answer.sse import AnswerWriter
from carousel.server.http.piece_writer import PieceWriter
from carousel.server.tenancy.entrance import LEAST_BYTES, TURN_BYTES, Entrance
from carousel.server.tenancy.unread_answers import UnreadAnswers
from tests.harness.http.loop_turns import gone_on_in_turns

PER_TURN = TURN_BYTES // LEAST_BYTES


async def begun_in_turns(sizes: Sequence[int], leaving: Collection[int] = ()) -> list[list[int]]:
    """Which of so many bodies, that come together, go on in each turn; `leaving` give up at once."""
    return await gone_on_in_turns(map(Entrance().enter, sizes), leaving)


def test_a_crowd_goes_on_a_few_at_a_time_in_the_order_in_which_it_came() -> None:
    turns = asyncio.run(begun_in_turns([100] * (3 * PER_TURN + 1)))
    assert [len(turn) for turn in turns] == [PER_TURN] * 3 + [1]
    assert [number for turn in turns for number in turn] == list(range(3 * PER_TURN + 1))


def test_few_do_not_wait() -> None:
    assert asyncio.run(begun_in_turns([100] * PER_TURN)) == [list(range(PER_TURN))]


def test_a_large_body_goes_on_alone() -> None:
    sizes = [100, TURN_BYTES * 30, TURN_BYTES, 100, 100]
    assert asyncio.run(begun_in_turns(sizes)) == [[0], [1], [2], [3, 4]]


def test_who_has_left_the_line_takes_nobodys_place() -> None:
    leaving = frozenset(range(PER_TURN, 3 * PER_TURN))
    turns = asyncio.run(begun_in_turns([100] * (4 * PER_TURN), leaving))
    assert [len(turn) for turn in turns] == [PER_TURN, PER_TURN]
    assert not leaving & set(turns[1])


def test_one_tenants_crowd_is_not_before_another_tenants_request() -> None:
    async def main() -> list[list[int]]:
        entrance = Entrance()
        tenants = ["alice"] * (5 * PER_TURN) + ["bob", "bob", "carol"]
        return await gone_on_in_turns((entrance.enter(100, tenant) for tenant in tenants), ())

    turns = asyncio.run(main())
    crowd = 5 * PER_TURN
    assert turns[0] == list(range(PER_TURN)), "when they came nobody else was there"
    assert [number for number in turns[1] if number >= crowd] == [crowd, crowd + 2, crowd + 1]
    assert sorted(number for turn in turns for number in turn) == list(range(crowd + 3))


def test_who_has_left_the_line_costs_its_tenant_no_turn() -> None:
    """A tenant was passed over once for each of its requests whose callers had left."""

    async def main() -> list[list[int]]:
        entrance = Entrance()
        tenants = ["alice"] * 5 + ["bob"] * 3
        large = (entrance.enter(TURN_BYTES, tenant) for tenant in tenants)
        return await gone_on_in_turns(large, leaving=[1, 2, 3])

    assert asyncio.run(main()) == [[0], [4], [5], [6], [7]]


def test_an_entrance_that_was_crowded_lets_the_next_ones_in_at_once() -> None:
    async def main() -> None:
        entrance = Entrance()
        await asyncio.gather(*(entrance.enter(100) for _ in range(5 * PER_TURN)))
        await asyncio.sleep(0)
        for _ in range(PER_TURN):
            with pytest.raises(StopIteration):  # as a coroutine does that has not waited
                entrance.enter(100).send(None)

    asyncio.run(main())


@pytest.mark.parametrize(("num_bytes", "most"), [(20, 8), (1 << 10, 8), (20 << 10, 2)])
def test_a_turn_of_the_loop_makes_few_pieces_however_short_they_are(num_bytes: int, most: int) -> None:
    """A turn unpacked 15 to 34 pieces of logprobs of which little was shown. The first does not wait."""
    made_in_turn = [0]

    def pieces() -> Iterator[bytes]:
        for _ in range(60):
            if not made_in_turn[-1]:
                asyncio.get_running_loop().call_soon(made_in_turn.append, 0)
            made_in_turn[-1] += 1
            yield b"x" * num_bytes

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def write() -> None:
        state: dict[str, Any] = {"send_body": send, "write_chunk": lambda _: False, "can_write": lambda: True}
        state["transport"] = Mock(PieceWriter)
        kept = UnreadAnswers(1 << 20).kept(cast(Any, None), "", lambda: 0)
        writer = AnswerWriter(send, state, kept, Entrance(), [])
        await writer.end(await writer.write_pieces(b"first", pieces()))

    sent: list[bytes] = []
    asyncio.run(write())
    assert b"".join(sent) == b"first" + b"x" * 60 * num_bytes
    assert sum(made_in_turn) == 60
    assert max(made_in_turn) <= most
