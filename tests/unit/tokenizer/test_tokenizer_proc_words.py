"""tokenizer_proc: stop words go to the detokenizer as they are, bad words to the scheduler as ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import IntArray, pack_ids
from runtime.wire.messages import StreamOpen
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.tokenizer_ring import GatedTokenizer, Ring, passed_on, refusal, request

IDS = pack_ids([5, 6, 7])


def test_stop_words_go_to_the_detokenizer(demo: Tokenizer) -> None:
    sampling = SamplingParams(seed=1, stop_words_ids=((5, 6), (7,)))
    (message,) = passed_on(Ring(demo), request(0, input_ids=IDS, sampling=sampling))
    opened = msgspec.msgpack.decode(message.stream_open, type=StreamOpen)
    assert opened.stop_words == (pack_ids([5, 6]), pack_ids([7]))


def spelled(demo: Tokenizer, *texts: str) -> set[tuple[int, ...]]:
    return {tuple(ids.tolist()) for ids in demo.encode_batch(texts, add_special_tokens=False)}


@pytest.mark.parametrize("word", ["return", " return"])
def test_a_bad_word_is_meant_with_and_without_a_space_before_it(demo: Tokenizer, word: str) -> None:
    sampling = SamplingParams(seed=1, bad_words=(word,))
    (message,) = passed_on(Ring(demo), request(0, input_ids=IDS, sampling=sampling))
    assert message.sampling.bad_words == ()
    assert set(message.sampling.bad_words_ids) == spelled(demo, "return", " return")


def test_bad_words_join_the_ids_given_and_each_is_there_once(demo: Tokenizer) -> None:
    (given,) = spelled(demo, "return")
    sampling = SamplingParams(seed=1, n=2, bad_words=("return", " return", " "), bad_words_ids=((5,), given))
    sent = passed_on(Ring(demo), request(0, input_ids=IDS, sampling=sampling))
    for message in sent:
        words = message.sampling.bad_words_ids
        assert words[:2] == ((5,), given)
        assert len(set(words)) == len(words)
        assert set(words) == {(5,)} | spelled(demo, "return", " return", " ")
        message.sampling.validate()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1, bad_words=("\u2603" * 200,)),
        SamplingParams(seed=1, bad_words=("xyz",), bad_words_ids=tuple((n, n) for n in range(192))),
    ],
)
def test_bad_words_past_a_limit_are_refused_by_name(demo: Tokenizer, sampling: SamplingParams) -> None:
    assert refusal(Ring(demo), request(0, input_ids=IDS, sampling=sampling)).error.param == "bad_words"


def test_a_bad_word_that_has_no_tokens_or_unknown_ones_is_refused_by_name(demo: Tokenizer) -> None:
    class Odd(GatedTokenizer):
        def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
            ids = super().encode_batch(texts, add_special_tokens=add_special_tokens)
            return [part[:0] if "none" in texts[0] else part + 5000 for part in ids]

    for word in ("none", "unknown"):
        sampling = SamplingParams(seed=1, bad_words=(word,))
        refused = refusal(Ring(Odd(demo)), request(0, input_ids=IDS, sampling=sampling))
        assert refused.error.param == "bad_words"
        assert word in refused.error.message


def test_one_turn_encodes_no_more_bad_words_than_its_share(demo: Tokenizer) -> None:
    ring = Ring(demo)
    words = tuple(chr(0x61 + n % 26) * 64 for n in range(64))
    ring.send(
        *(request(seq, input_ids=IDS, sampling=SamplingParams(seed=1, bad_words=words)) for seq in range(40))
    )
    assert ring.loop.turn()
    assert 1 <= len(ring.scheduler.drain()) < 40
