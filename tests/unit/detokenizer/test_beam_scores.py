"""The score of a hypothesis, and the sum of its logprobs, which comes without logprobs."""

from __future__ import annotations

from detokenizer_proc.text_stream import TextStream
from runtime.wire.format import pack_ids
from runtime.wire.handle import make_handle
from runtime.wire.hypotheses import BeamScore
from runtime.wire.messages import Closed, StreamOpen


class NoText:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def test_an_end_has_what_the_scheduler_says_of_the_hypothesis() -> None:
    handle = make_handle(1, 1)
    stream = TextStream(StreamOpen(handle, 3), NoText(), lambda ids: "")
    stream.close(Closed(handle, "length", beam=BeamScore(-0.5, -2.0)), frozenset())
    assert stream.finish is not None
    assert (stream.finish.score, stream.finish.cumulative_logprob) == (-0.5, -2.0)


def test_a_hypothesis_that_a_stop_word_has_ended_names_it() -> None:
    handle = make_handle(1, 1)
    stream = TextStream(StreamOpen(handle, 3, stop_words=(pack_ids([5, 6]),)), NoText(), lambda ids: "word")
    for token in (4, 5, 6):
        stream.push(token, pack_ids([token]))
    stream.close(Closed(handle, "stop", beam=BeamScore(-0.5, -2.0)), frozenset())
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.matched, stream.finish.score) == ("stop", "word", -0.5)
    assert stream.output().token_ids == pack_ids([4, 5, 6])


def test_what_is_shown_of_a_search_is_the_newest_alone_and_nothing_at_its_end() -> None:
    handle = make_handle(1, 1)
    stream = TextStream(StreamOpen(handle, 3, stream=True), NoText(), lambda ids: "")
    stream.show(pack_ids([4]))
    stream.show(pack_ids([5, 6]))
    assert stream.has_news()
    assert (stream.output().hypothesis, stream.output().token_ids) == (pack_ids([5, 6]), b"")
    stream.mark_sent()
    assert not stream.has_news()
    stream.show(pack_ids([5, 6, 7]))
    stream.close(Closed(handle, "length", beam=BeamScore(-0.5, -2.0)), frozenset())
    assert stream.output().hypothesis == b""


def test_an_end_without_a_search_has_none() -> None:
    handle = make_handle(1, 1)
    stream = TextStream(StreamOpen(handle, 3), NoText(), lambda ids: "")
    stream.close(Closed(handle, "length"), frozenset())
    assert stream.finish is not None
    assert (stream.finish.score, stream.finish.cumulative_logprob) == (None, None)
