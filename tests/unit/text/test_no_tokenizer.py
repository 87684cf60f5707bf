"""Without a tokenizer: ids go in and come out, and text is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from detokenizer_proc.text_stream import TextStream
from runtime.base.errors import ConfigError, InvalidRequest
from runtime.launcher.resolved_config import resolve_config
from runtime.settings.config import RuntimeConfig
from runtime.text.no_tokenizer import NoTextDecoders, NoTokenizer
from runtime.text.selection import open_decoders, open_tokenizer
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.messages import ChatMessage, Closed, Resume, StreamOpen
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.tokenizer_ring import Ring, handle, passed_on, refusal, request
from tokenizer_proc.validation import Validator

ROOT = Path(__file__).resolve().parents[3]
IDS = pack_ids([5, 6, 7])


@pytest.fixture
def ring() -> Ring:
    return Ring(NoTokenizer(), validator=Validator(4096, 64, takes_text=False))


def resolved(**settings: Any) -> RuntimeConfig:
    config = RuntimeConfig(skip_tokenizer_init=True, **settings)
    return resolve_config(config, context_length=2048, dtype="bfloat16", model_path=ROOT)


def test_no_directory_means_no_tokenizer() -> None:
    assert resolved().tokenizer == ""
    assert isinstance(open_tokenizer(""), NoTokenizer)
    assert isinstance(open_decoders(open_tokenizer("")), NoTextDecoders)


@pytest.mark.parametrize("named", ["tokenizer", "chat_template"])
def test_a_tokenizer_that_would_not_be_loaded_is_refused(named: str, tmp_path: Path) -> None:
    value = tmp_path
    if named == "chat_template":
        value = tmp_path / "template.jinja"
        value.touch()
    with pytest.raises(ConfigError, match=f"^{named}: .*skip_tokenizer_init"):
        resolved(**{named: str(value)})


def test_special_tokens_of_messages_that_are_not_taken_cannot_be_allowed() -> None:
    with pytest.raises(ConfigError, match=r"^allow_special_tokens: "):
        resolved(allow_special_tokens=True)


def test_a_prompt_of_ids_passes_with_all_that_is_said_in_ids(ring: Ring) -> None:
    sampling = SamplingParams(
        seed=1, n=2, stop_token_ids=(9,), stop_words_ids=((3, 4),), bad_words_ids=((8,),), logprobs=2
    )
    first, second = passed_on(ring, request(1, input_ids=IDS, sampling=sampling))
    assert unpack_ids(first.input_ids).tolist() == unpack_ids(second.input_ids).tolist() == [5, 6, 7]
    assert first.sampling.bad_words_ids == ((8,),)
    assert first.sampling.stop_token_ids == (9,)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "x"}, "text"),
        ({"text": ""}, "text"),
        ({"messages": (ChatMessage("user", "x"),)}, "messages"),
        ({"input_ids": IDS, "sampling": SamplingParams(seed=1, stop=("x",))}, "stop"),
        ({"input_ids": IDS, "sampling": SamplingParams(seed=1, bad_words=("x",))}, "bad_words"),
    ],
)
def test_text_is_refused_by_the_name_of_its_field_and_of_the_flag(
    ring: Ring, fields: dict[str, Any], param: str
) -> None:
    error = refusal(ring, request(1, **fields)).error
    assert (error.status, error.param, error.code) == (400, param, "no_tokenizer")
    assert error.message.startswith(f"{param}: ")
    assert "--skip-tokenizer-init" in error.message


def test_what_is_no_use_without_a_tokenizer_refuses_by_name() -> None:
    none = NoTokenizer()
    refusals: dict[str, Callable[[], object]] = {
        "prompt": lambda: none.encode_batch(["x"]),
        "messages": lambda: none.apply_chat_template([{"role": "user", "content": "x"}]),
        "tokens": lambda: none.decode([1]),
    }
    for param, ask in refusals.items():
        with pytest.raises(InvalidRequest, match="--skip-tokenizer-init") as caught:
            ask()
        assert caught.value.param == param


def stream_of(**fields: Any) -> TextStream:
    decoders = NoTextDecoders()
    opened = StreamOpen(handle(1), 3, IDS, **fields)
    return TextStream(opened, decoders.open([5, 6, 7]), decoders.text_of)


def test_a_sequence_has_ids_and_no_text() -> None:
    stream = stream_of()
    assert not any(stream.push(token, pack_ids([token])) for token in (10, 11, 12))
    stream.close(Closed(handle(1), "length"), frozenset())
    output = stream.output()
    assert (output.text, unpack_ids(output.token_ids).tolist()) == ("", [10, 11, 12])
    assert output.finish is not None
    assert output.finish.usage.completion_tokens == 3


def test_a_stop_word_ends_a_sequence_and_is_told_by_its_ids() -> None:
    stream = stream_of(stop_words=(pack_ids([11, 12]),))
    assert [stream.push(token, pack_ids([token])) for token in (10, 11, 12)] == [False, False, True]
    stream.close(Closed(handle(1), "stop_string"), frozenset())
    output = stream.output()
    assert output.finish is not None
    assert (output.finish.reason, output.finish.matched) == ("stop", "token_id:11 token_id:12")
    assert (output.text, unpack_ids(output.token_ids).tolist()) == ("", [10, 11, 12])


def test_an_earlier_attempt_is_gone_on_with() -> None:
    resume = Resume(pack_ids([10, 11]), 0, 0.0, 0)
    stream = stream_of(resume=resume)
    assert not stream.replay([10, 11], 0, 0.0)
    stream.push(12, pack_ids([12]))
    assert unpack_ids(stream.output().token_ids).tolist() == [12]
