"""A sequence with stop strings: where its text ends, what its terminal says, what the scheduler is told."""

from __future__ import annotations

import random

import pytest

from runtime.text.incremental import DecoderFactory
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import pack_ids
from runtime.wire.messages import Closed, CloseReason, Resume, StopMatched
from tests.harness.ring.detokenizer_ring import Ring


@pytest.fixture
def ring(demo: Tokenizer) -> Ring:
    return Ring(demo)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_at_once_and_the_sequence_when_it_is_closed(
    ring: Ring, include: bool
) -> None:
    handle = ring.open(ring.handle(), stop=("END",), include_stop_str_in_output=include)
    ring.generate(handle, "a = 1 END")
    num_tokens = len(ring.ids("a = 1 END"))
    assert ring.text(handle) == ("a = 1 END" if include else "a = 1 ")
    assert ring.scheduler.drain() == [StopMatched(handle, num_tokens)]
    ring.generate(handle, " overrun")
    assert all(output.finish is None for output in ring.outputs)
    ring.close(handle, "stop_string")
    finish = ring.terminal(handle)
    assert (finish.reason, finish.matched) == ("stop", "END")
    assert finish.usage.completion_tokens == num_tokens
    assert ring.token_ids(handle) == ring.ids("a = 1 END")
    assert "overrun" not in ring.text(handle)


@pytest.mark.parametrize("reason", ["length", "abort", "stop", "timeout"])
def test_a_stop_string_in_the_text_goes_before_the_scheduler_s_reason(
    ring: Ring, reason: CloseReason
) -> None:
    handle = ring.open(ring.handle(), stop=("END",))
    ring.generate(handle, "END")
    ring.close(handle, reason)
    assert (ring.terminal(handle).reason, ring.terminal(handle).matched) == ("stop", "END")


def test_text_that_only_began_a_stop_string_comes_with_the_terminal(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stop=("END of all",))
    ring.generate(handle, "x END")
    assert ring.text(handle) == "x "
    ring.close(handle)
    assert ring.text(handle) == "x END"
    assert ring.terminal(handle).reason == "length"


def test_stop_strings_are_ignored_before_min_tokens(ring: Ring) -> None:
    ids = ring.ids("a\nb\nc\n")
    handle = ring.open(ring.handle(), stop=("\n",), min_tokens=4)
    for token in ids:
        ring.step((handle, token))
    assert len(ids) == 6
    assert ring.text(handle) == "a\nb\nc"
    assert ring.scheduler.drain() == [StopMatched(handle, 6)]


def test_a_scheduler_without_room_does_not_hold_up_the_text(ring: Ring, demo: Tokenizer) -> None:
    handle = ring.open(ring.handle(), stop=("END",))
    ring.scheduler._capacity = 0
    ring.generate(handle, "END")
    other = ring.open(ring.handle(1))
    ring.generate(other, "text")
    assert ring.text(other) == "text"
    assert ring.loop.is_busy
    ring.scheduler._capacity = 10
    ring.turn()
    assert ring.scheduler.drain() == [StopMatched(handle, len(ring.ids("END")))]
    assert not ring.loop.is_busy


def stop_reference(
    ring: Ring, ids: list[int], stops: tuple[str, ...], min_tokens: int
) -> tuple[str, str | None, int]:
    """(text, the stop string that ends it, tokens up to there), by the whole text after each token."""
    decoder = DecoderFactory(ring.tokenizer).open([5])
    text = ""
    for count in range(1, len(ids) + 2):
        piece = decoder.push(ids[count - 1]) if count <= len(ids) else decoder.flush()
        begin, text = len(text), text + piece
        if min(count, len(ids)) <= min_tokens:
            continue
        for end in range(begin + 1, len(text) + 1):
            matches = [stop for stop in stops if text[:end].endswith(stop)]
            if matches:
                stop = max(matches, key=len)
                return text[: end - len(stop)], stop, min(count, len(ids))
    return text, None, len(ids)


def test_stop_strings_cut_the_same_text_streamed_at_once_and_resumed(ring: Ring) -> None:
    rng = random.Random(0)
    pool = sorted({token for text in ("ab ba aab\n", "é😀漢") for token in ring.ids(text)})
    num_matches = 0
    for number in range(60):
        ids = rng.choices(pool, k=rng.randrange(1, 14))
        stops = tuple(
            {"".join(rng.choices("ab\né漢 ", k=rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4))}
        )
        min_tokens = rng.choice([0, 0, rng.randrange(6)])
        expected = stop_reference(ring, ids, stops, min_tokens)
        num_matches += expected[1] is not None
        for seq, split in ((2 * number, 0), (2 * number + 1, rng.randrange(expected[2] + 1))):
            first = ring.open(ring.handle(seq), stream=bool(split), stop=stops, min_tokens=min_tokens)
            ring.step(*((first, token) for token in ids[:split]))
            handle, resume = ring.handle(seq, attempt=1), Resume(pack_ids(ids[:split]), len(ring.text(first)))
            ring.open(handle, stream=bool(split), stop=stops, min_tokens=min_tokens, resume=resume)
            # The length limit comes with the last token, and a stop string in the text goes before it.
            ring.step(*((handle, token) for token in ids[split:]), closed=(Closed(handle, "length"),))
            finish = ring.terminal(handle)
            assert ring.text(first) + ring.text(handle) == expected[0], (ids, stops, split)
            assert (finish.matched, finish.usage.completion_tokens) == expected[1:]
            assert finish.reason == ("length" if expected[1] is None else "stop")
            ring.outputs.clear()
    assert num_matches > 15
