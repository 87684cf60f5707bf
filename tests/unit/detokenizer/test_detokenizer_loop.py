"""detokenizer_proc.loop: every sequence gets its text and exactly one terminal."""

from __future__ import annotations

import logging
import random

import msgspec
import pytest

from detokenizer_proc.loop import PIECE_TOKENS
from runtime.ring.process import FIRST_EPOCH
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import pack_ids, unpack_floats, unpack_ids
from runtime.wire.messages import (
    AbortRequest,
    Closed,
    CloseReason,
    ErrorInfo,
    RequestFailed,
    Resume,
    StopMatched,
    StreamOpen,
    TensorBatch,
    TokenBatch,
)
from tests.harness.cases import for_each
from tests.harness.ring.detokenizer_ring import EOS, RAW, Ring, logprobs
from tests.harness.ring.hostile_frames import hostile_frames

TEXT = "def f(x): return '😀漢'\n"


@pytest.fixture
def ring(demo: Tokenizer) -> Ring:
    return Ring(demo)


# -- text and terminals --------------------------------------------------------------------------------------


def test_a_stream_sends_what_is_new_at_each_step_and_the_terminal_last(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.generate(handle, TEXT)
    assert ring.num_batches == len(ring.ids(TEXT))
    ring.close(handle, cached_tokens=16)
    assert ring.text(handle) == TEXT
    assert ring.token_ids(handle) == ring.ids(TEXT)
    finish = ring.terminal(handle)
    assert (finish.reason, finish.matched, finish.cumulative_logprob) == ("length", None, None)
    assert finish.usage.prompt_tokens == 5
    assert finish.usage.completion_tokens == len(ring.ids(TEXT))
    assert finish.usage.cached_tokens == 16
    assert ring.loop.num_live == 0


def test_a_stream_tells_the_length_of_its_prompt_once(ring: Ring) -> None:
    streamed, whole = ring.open(ring.handle()), ring.open(ring.handle(1), stream=False)
    for _ in range(3):
        ring.step((streamed, 70), (whole, 70))
    ring.close(streamed)
    ring.close(whole)
    assert [each.num_prompt_tokens for each in ring.outputs if each.handle == streamed] == [5, 0, 0, 0]
    assert not any(each.num_prompt_tokens for each in ring.outputs if each.handle == whole)


def test_a_sequence_whose_time_is_over_keeps_its_text(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stop=("END of all",))
    ring.generate(handle, "x END")
    ring.close(handle, "timeout")
    assert ring.text(handle) == "x END"
    assert ring.terminal(handle).reason == "timeout"
    assert ring.terminal(handle).usage.completion_tokens == len(ring.ids("x END"))


def test_a_long_output_without_streaming_goes_out_in_large_pieces(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stream=False)
    ids = [70 + n % 50 for n in range(3 * PIECE_TOKENS + 5)]
    for token in ids:
        ring.step((handle, token))
    assert [len(unpack_ids(output.token_ids)) for output in ring.outputs] == [PIECE_TOKENS] * 3
    ring.close(handle)
    assert ring.token_ids(handle) == ids
    assert ring.text(handle) == ring.tokenizer.decode(ids)


def pieces_of(ring: Ring, handle: bytes) -> list[int]:
    """Number of tokens in each output of a sequence."""
    return [len(unpack_ids(output.token_ids)) for output in ring.outputs if output.handle == handle]


@for_each(
    ("interval", "num_tokens", "pieces"),
    [(1, 4, [1, 1, 1, 1, 0]), (4, 11, [1, 4, 4, 2]), (4, 9, [1, 4, 4, 0]), (4, 1, [1, 0]), (99, 7, [1, 6])],
)
def test_a_stream_goes_out_at_its_first_token_each_interval_and_its_end(
    demo: Tokenizer, interval: int, num_tokens: int, pieces: list[int]
) -> None:
    ring = Ring(demo, stream_interval=interval)
    handle = ring.open(ring.handle())
    ids = [70 + n % 50 for n in range(num_tokens)]
    for token in ids:
        ring.step((handle, token))
    ring.close(handle)
    assert pieces_of(ring, handle) == pieces
    assert ring.token_ids(handle) == ids
    assert ring.text(handle) == ring.tokenizer.decode(ids)


def test_an_interval_counts_from_what_was_sent_for_another_reason(demo: Tokenizer) -> None:
    ring = Ring(demo, stream_interval=4)
    handle = ring.open(ring.handle())
    ring.step(prompt_logprobs=(logprobs(handle, [-1.0]),))
    for token in range(70, 77):
        ring.step((handle, token))
    assert pieces_of(ring, handle) == [0, 1, 4]


def test_a_stop_string_within_an_interval_ends_the_sequence_at_once(demo: Tokenizer) -> None:
    ring = Ring(demo, stream_interval=99)
    handle = ring.open(ring.handle(), stop=("END",))
    num_tokens = len(ring.ids("ab END"))
    ring.generate(handle, "ab END")
    assert StopMatched(handle, num_tokens) in ring.scheduler.drain(99)


def test_a_sequence_that_is_submitted_again_shows_its_next_token_at_once(demo: Tokenizer) -> None:
    ring = Ring(demo, stream_interval=4)
    known = ring.ids("x = ")
    resume = Resume(pack_ids(known), len("x = "))
    handle = ring.open(ring.handle(attempt=1), resume=resume)
    for token in range(70, 76):
        ring.step((handle, token))
    assert pieces_of(ring, handle) == [1, 4]


def test_a_short_output_without_streaming_goes_out_at_its_end(ring: Ring) -> None:
    handle = ring.open(ring.handle(), stream=False)
    ring.generate(handle, TEXT)
    assert ring.outputs == []
    ring.close(handle)
    (output,) = ring.outputs
    assert (output.text, unpack_ids(output.token_ids).tolist()) == (TEXT, ring.ids(TEXT))


@pytest.mark.parametrize("stream", [True, False])
def test_an_incomplete_character_is_flushed_with_the_terminal(ring: Ring, stream: bool) -> None:
    handle = ring.open(ring.handle(), stream=stream)
    for token in ring.ids("a😀")[:-1]:
        ring.step((handle, token))
    assert ring.text(handle) == ("a" if stream else "")
    ring.close(handle)
    assert ring.text(handle) == "a\ufffd"


@pytest.mark.parametrize(("token", "matched"), [(EOS, None), (75, 75)])
def test_a_stop_token_counts_but_shows_no_text(ring: Ring, token: int, matched: int | None) -> None:
    handle = ring.open(ring.handle(), skip_special_tokens=False)
    ring.generate(handle, "ab")
    ring.step((handle, token), closed=(Closed(handle, "stop", stop_token=token),))
    assert ring.text(handle) == "ab"
    assert ring.token_ids(handle) == [*ring.ids("ab"), token]
    finish = ring.terminal(handle)
    assert (finish.reason, finish.matched) == ("stop", matched)
    assert finish.usage.completion_tokens == len(ring.ids("ab")) + 1


def test_the_same_token_earlier_in_a_sequence_keeps_its_text(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.step((handle, 75), (handle, 75), closed=(Closed(handle, "stop", stop_token=75),))
    assert ring.text(handle) == ring.tokenizer.decode([75])
    assert ring.token_ids(handle) == [75, 75]


@pytest.mark.parametrize("reason", ["abort", "error", "length", "timeout"])
def test_the_scheduler_s_reason_is_the_terminal_s(ring: Ring, reason: CloseReason) -> None:
    handle = ring.open(ring.handle())
    error = ErrorInfo("broke", "worker_failed") if reason == "error" else None
    ring.close(handle, reason, error=error)
    assert (ring.terminal(handle).reason, ring.terminal(handle).error) == (reason, error)


def test_nothing_follows_a_terminal(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.close(handle)
    ring.generate(handle, TEXT)
    ring.close(handle, "abort")
    assert ring.terminal(handle).reason == "length"
    assert ring.text(handle) == ""


def test_sequences_of_one_step_share_one_output_batch(ring: Ring) -> None:
    handles = [ring.open(ring.handle(seq)) for seq in range(3)]
    ring.step(*((handle, 70 + n) for n, handle in enumerate(handles)))
    assert ring.num_batches == 1
    assert [output.handle for output in ring.outputs] == handles


# -- logprobs ------------------------------------------------------------------------------------------------


def test_logprobs_stay_in_step_with_the_ids_and_are_summed(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.step((handle, 70), logprobs=(logprobs(handle, [-0.5]),))
    ring.step((handle, 71), (handle, 72), logprobs=(logprobs(handle, [-1.0, -0.25]),))
    ring.close(handle)
    assert [unpack_floats(output.logprobs).tolist() for output in ring.outputs] == [[-0.5], [-1.0, -0.25], []]
    assert unpack_ids(ring.outputs[1].top_ids).tolist() == [0, 1, 0, 1]
    assert unpack_floats(ring.outputs[1].top_logprobs).tolist() == [-1.0, -2.0, -0.25, -1.25]
    assert ring.terminal(handle).cumulative_logprob == -1.75


def test_logprobs_of_tokens_behind_a_stop_string_are_dropped(ring: Ring) -> None:
    first, *_ = ids = ring.ids("\n")
    assert len(ids) == 1
    handle = ring.open(ring.handle(), stop=("\n",))
    ring.step((handle, 70), (handle, first), (handle, 71), logprobs=(logprobs(handle, [-1.0, -2.0, -4.0]),))
    ring.close(handle, "stop_string")
    assert ring.token_ids(handle) == [70, first]
    assert unpack_floats(ring.outputs[0].logprobs).tolist() == [-1.0, -2.0]
    assert len(ring.outputs[0].top_ids) == 2 * 2 * 4
    assert ring.terminal(handle).cumulative_logprob == -3.0


# -- attempts and resuming -----------------------------------------------------------------------------------


def test_a_higher_attempt_replaces_a_lower_one_without_a_terminal(ring: Ring) -> None:
    old, new = ring.handle(attempt=0), ring.handle(attempt=1)
    ring.open(old)
    ring.open(new)
    ring.step((old, 70), (new, 71), closed=(Closed(old, "abort"), Closed(new, "length")))
    assert [output.handle for output in ring.outputs] == [new]
    assert ring.token_ids(new) == [71]


def test_a_lower_attempt_is_dropped(ring: Ring) -> None:
    new, old = ring.open(ring.handle(attempt=1)), ring.handle(attempt=0)
    ring.open(old)
    ring.inbox.send(RequestFailed(old, ErrorInfo("late")))
    ring.generate(old, TEXT)
    ring.generate(new, "x")
    assert ring.outputs
    assert all(output.handle == new for output in ring.outputs)


@pytest.mark.parametrize("num_chars", [0, 3, 9])
def test_a_resumed_sequence_goes_on_after_the_last_character_delivered(ring: Ring, num_chars: int) -> None:
    ids = ring.ids(TEXT)
    for split in range(len(ids)):
        before = ring.open(ring.handle(split))
        for token in ids[:split]:
            ring.step((before, token))
        if len(ring.text(before)) < num_chars:
            continue
        handle = ring.handle(split, attempt=1)
        resume = Resume(pack_ids(ids[:split]), num_chars, cumulative_logprob=-2.0)
        ring.open(handle, resume=resume)
        for token in ids[split:]:
            ring.step((handle, token))
        ring.close(handle)
        assert ring.text(handle) == TEXT[num_chars:]
        assert ring.token_ids(handle) == ids[split:]
        finish = ring.terminal(handle)
        assert finish.usage.completion_tokens == len(ids)
        assert finish.cumulative_logprob == -2.0


def test_who_claims_more_text_than_his_ids_give_fails_alone(ring: Ring) -> None:
    other = ring.open(ring.handle(2))
    ids = ring.ids("x = 1")
    handle = ring.open(ring.handle(1, attempt=1), resume=Resume(pack_ids(ids), 6))
    error = ring.terminal(handle).error
    assert (error.status, error.param) == (400, "resume")
    assert ring.scheduler.drain() == [AbortRequest((handle,))]
    ring.generate(other, "fine")
    ring.close(other)
    assert ring.text(other) == "fine"


def test_a_new_engine_ends_what_the_one_before_had_without_a_word(ring: Ring) -> None:
    """Its client makes it again; last words of the old one are not believed."""
    old, new = ring.open(ring.handle()), ring.handle(attempt=1)
    opened = msgspec.Raw(RAW(StreamOpen(ring.handle(5), 1)))
    ring.inbox.send(TokenBatch(1, epoch=2))
    ring.inbox.send(TokenBatch(2, opened=(opened,), closed=(Closed(old, "length"),), epoch=1))
    ring.turn()
    assert ring.loop.num_live == 0
    assert not ring.outputs
    ring.inbox.send(TokenBatch(2, opened=(msgspec.Raw(RAW(StreamOpen(new, 1))),), epoch=2))
    ring.turn()
    assert ring.loop.num_live == 1


def test_a_stop_string_found_while_resuming_stops_again(ring: Ring) -> None:
    ids = ring.ids("x END")
    handle = ring.open(ring.handle(attempt=1), stop=("END",), resume=Resume(pack_ids(ids), 2))
    assert ring.scheduler.drain() == [StopMatched(handle, len(ids))]
    ring.generate(handle, "overrun")
    ring.close(handle, "stop_string")
    assert ring.text(handle) == ""
    assert ring.terminal(handle).usage.completion_tokens == len(ids)


def test_a_resumed_sequence_with_nothing_new_sends_nothing(ring: Ring) -> None:
    ids = ring.ids("x = 1")
    handle = ring.open(ring.handle(attempt=1), resume=Resume(pack_ids(ids), len("x = 1")))
    assert ring.outputs == []
    ring.close(handle)
    assert ring.token_ids(handle) == []
    assert ring.terminal(handle).usage.completion_tokens == len(ids)


def test_resumed_logprobs_continue_the_sum(ring: Ring) -> None:
    handle = ring.open(ring.handle(attempt=1), resume=Resume(pack_ids([70, 71]), 2, cumulative_logprob=-2.0))
    ring.step((handle, 72), logprobs=(logprobs(handle, [-0.5]),))
    ring.close(handle)
    assert ring.terminal(handle).cumulative_logprob == -2.5


# -- what breaks ---------------------------------------------------------------------------------------------


def test_what_breaks_in_one_sequence_ends_it_alone_and_is_logged_without_its_text(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = ring.open(ring.handle(0)), ring.open(ring.handle(1))

    class Breaks:
        def push(self, token: int) -> str:
            raise RuntimeError("secret text")

        def flush(self) -> str:
            raise RuntimeError("secret text")

    ring.loop._live[bad].stream._decoder = Breaks()
    with caplog.at_level(logging.DEBUG):
        ring.step((bad, 70), (good, 71))
        ring.step((bad, 70), (good, 72), closed=(Closed(bad, "abort"), Closed(good, "length")))
    assert ring.terminal(bad).error.code == "internal_error"
    assert ring.token_ids(good) == [71, 72]
    assert ring.scheduler.drain() == [AbortRequest((bad,))]
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def test_a_batch_that_contradicts_itself_is_dropped(ring: Ring) -> None:
    handle = ring.open(ring.handle())
    ring.inbox.send(TokenBatch(9, handle, pack_ids([70, 71])))
    ring.inbox.send(TokenBatch(9, handle, b"\1\2\3\4\5"))
    ring.inbox.send(TokenBatch(9, handle[:-1], pack_ids([70])))
    ring.inbox.send(TokenBatch(10, opened=(msgspec.Raw(RAW(["no", "stream"])),)))
    ring.turn()
    ring.step((handle, 72))
    assert ring.token_ids(handle) == [72]


def test_mutated_frames_raise_nothing_and_are_logged_once_a_second(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring = Ring(demo, engine_epoch=FIRST_EPOCH)
    monkeypatch.setattr("tests.harness.ring.hostile_frames.HANDLE", ring.handle(0))
    # Far from it, so that no mutated frame means this sequence.
    good = ring.open(ring.handle(0x5A5A5A5A))
    with caplog.at_level(logging.WARNING):
        for frames in hostile_frames("detokenizer_in", 0, 3000, random.Random(1)):
            if len(frames) == 1:
                ring.inbox._messages.append((frames[0], ()))
                ring.turn()
        for _ in range(100):
            ring.inbox.send(TensorBatch(()))
            ring.inbox.send(TokenBatch(9, good, pack_ids([70, 71]), epoch=FIRST_EPOCH))
        ring.turn()
    num_bad = sum("dropped a frame" in record.message for record in caplog.records)
    assert 0 < num_bad < 30
    ring.generate(good, TEXT)
    ring.close(good)
    assert ring.text(good) == TEXT


def test_every_sequence_of_random_traffic_has_one_terminal_and_the_whole_text(ring: Ring) -> None:
    rng = random.Random(0)
    handles = [ring.handle(seq) for seq in range(40)]
    ids = {handle: rng.choices(range(4096), k=rng.randrange(1, 20)) for handle in handles}
    streams = {handle: rng.random() < 0.5 for handle in handles}
    left = {handle: list(tokens) for handle, tokens in ids.items()}
    for handle in handles:
        ring.open(handle, stream=streams[handle])
    while left:
        chosen = [handle for handle in left if rng.random() < 0.5]
        ended = []
        tokens = []
        for handle in chosen:
            take = min(len(left[handle]), rng.randrange(1, 3))
            tokens += [(handle, left[handle].pop(0)) for _ in range(take)]
            if not left[handle]:
                del left[handle]
                ended.append(Closed(handle, "length"))
        if rng.random() < 0.3:
            ring.peers.full = {b"peer"} - ring.peers.full
        ring.step(*tokens, closed=tuple(ended))
    ring.peers.full.clear()
    ring.turn()
    for handle in handles:
        assert ring.terminal(handle).usage.completion_tokens == len(ids[handle])
        assert ring.token_ids(handle) == ids[handle]
        assert ring.text(handle) == ring.tokenizer.decode(ids[handle])
    assert not ring.loop.is_busy
