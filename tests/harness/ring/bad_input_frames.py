"""Bad input of callers with their own library: calls of the client library, and handmade frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from runtime.wire.format import Message, pack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import ChatMessage, GenerateRequest, Resume
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import MessageCodec
from tests.harness.http.bad_input import CONTEXT, TOO_LONG, USER, VOCABULARY


@dataclass(frozen=True)
class SdkCase:
    id: str
    prompt: Any
    sampling: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    status: int = 400
    code: str = "invalid_value"
    param: str | None = None
    part: str = ""


@dataclass(frozen=True)
class FrameCase:
    id: str
    frames: Callable[[MessageCodec, int], list[bytes]]
    """From the codec of the socket and the client's id; request number REQUEST is the one to answer."""
    code: str | None = None
    """None: nobody can be told, so it is dropped."""
    param: str | None = None


SDK_CASES = (
    SdkCase("no ids", np.zeros(0, np.int32), param="prompt", part="empty"),
    SdkCase("no text", "", param="prompt", part="empty"),
    SdkCase("bytes", b"x", param="prompt"),
    SdkCase("bools", [True, False], param="prompt"),
    SdkCase("floats", [1.0], param="prompt"),
    SdkCase("negative ids", [-1], param="prompt"),
    SdkCase("ids out of range", [VOCABULARY * 16], param="prompt", part="token id"),
    SdkCase("too long by one", [7] * CONTEXT, code=TOO_LONG, param="prompt", part=str(CONTEXT)),
    SdkCase("a message without content", [{"role": "user"}], param="messages"),
    SdkCase("an unknown key", [{**USER, "images": "x"}], param="messages"),
    SdkCase("NaN", "x", {"temperature": float("nan")}, param="temperature"),
    SdkCase("infinity", "x", {"top_p": float("inf")}, param="top_p"),
    SdkCase("minus infinity", "x", {"presence_penalty": float("-inf")}, param="presence_penalty"),
    SdkCase("bool as a count", "x", {"max_tokens": True}, param="max_tokens"),
    SdkCase("text as a flag", "x", {"ignore_eos": "yes"}, param="ignore_eos"),
    SdkCase("n too high", "x", {"n": 129}, param="n"),
    SdkCase("a bias of infinity", "x", {"logit_bias": {1: float("inf")}}, param="logit_bias"),
    SdkCase("a bias twice", "x", {"logit_bias": [(1, 1.0), (1, 2.0)]}, param="logit_bias"),
    SdkCase(
        "stop ids beyond the vocabulary", "x", {"stop_token_ids": [VOCABULARY * 16]}, param="stop_token_ids"
    ),
    SdkCase("an empty stop word", "x", {"stop_words_ids": [[]]}, param="stop_words_ids"),
    SdkCase(
        "logits that the launch does not allow",
        "x",
        {"return_context_logits": True},
        param="return_context_logits",
    ),
    SdkCase("priority out of range", "x", options={"priority": 5000}, param="priority"),
    SdkCase("a long label", "x", options={"label": "x" * 300}, param="label"),
    SdkCase("a time limit below zero", "x", options={"time_limit": -1.0}, param="time_limit"),
)

REQUEST = 9
SAMPLING = SamplingParams(max_tokens=1, seed=1)


def request_of(client: int, **fields: Any) -> GenerateRequest:
    if not fields.keys() & {"text", "input_ids", "messages"}:
        fields["text"] = "x"
    handle = fields.pop("handle", make_handle(client, REQUEST))
    return GenerateRequest(handle, fields.pop("sampling", SAMPLING), **fields)


def _frame(case_id: str, code: str | None, param: str | None = None, **fields: Any) -> FrameCase:
    """A request that another library could send, with one thing wrong."""
    return FrameCase(case_id, lambda codec, client: [codec.encode(request_of(client, **fields))], code, param)


def _damaged(case_id: str, damage: Callable[[bytes], list[bytes]]) -> FrameCase:
    return FrameCase(case_id, lambda codec, client: damage(codec.encode(request_of(client))))


def _replaced(case_id: str, at: int, value: Any) -> FrameCase:
    """A field of the wrong type or out of its bounds: no message, so there is nobody to answer to."""

    def frames(codec: MessageCodec, client: int) -> list[bytes]:
        frame = codec.encode(request_of(client))
        fields = msgspec.msgpack.decode(frame[len(codec.header) :])
        fields[at] = value
        return [codec.header + msgspec.msgpack.encode(fields)]

    return FrameCase(case_id, frames)


class Foreign(Message, frozen=True):
    """A message that no socket knows."""

    number: int = 1


FRAME_CASES = (
    _damaged("an empty frame", lambda frame: [b""]),
    _damaged("half a header", lambda frame: [frame[:7]]),
    _damaged("a header alone", lambda frame: [frame[:16]]),
    _damaged("a truncated frame", lambda frame: [frame[:-3]]),
    _damaged("more behind the message", lambda frame: [frame + b"\0"]),
    _damaged("another magic", lambda frame: [b"HTTP" + frame[4:]]),
    _damaged("another version", lambda frame: [frame[:4] + b"\x63\0" + frame[6:]]),
    _damaged("another schema", lambda frame: [frame[:6] + b"\0" * 6 + frame[12:]]),
    _damaged("three frames", lambda frame: [frame, frame, frame]),
    _damaged("16 MiB", lambda frame: [frame[:16] + b"\xc6\x01\0\0\0" + b"\0" * (1 << 24)]),
    FrameCase("a foreign message", lambda codec, client: [codec.header + msgspec.msgpack.encode(Foreign())]),
    FrameCase("deep msgpack", lambda codec, client: [codec.header + b"\x91" * 100_000]),
    _replaced("a short handle", 1, b"short"),
    _replaced("a handle of text", 1, "x" * 16),
    _replaced("a sampling of text", 2, "x"),
    _replaced("a text of bad bytes", 3, b"\xff\xff"),
    _frame("no form of a prompt", "invalid_value", "prompt", text=None),
    _frame("two forms of a prompt", "invalid_value", "prompt", text="x", input_ids=pack_ids([1])),
    _frame("ids that are not whole", "invalid_value", "input_ids", input_ids=b"\1\2\3"),
    _frame("no ids", "invalid_value", "input_ids", input_ids=b""),
    _frame("negative ids", "invalid_value", "input_ids", input_ids=pack_ids([-1])),
    _frame("ids out of range", "invalid_value", "input_ids", input_ids=pack_ids([VOCABULARY * 16])),
    _frame("no messages", "invalid_value", "messages", messages=()),
    _frame(
        "a template's variables that are no map",
        "invalid_value",
        "chat_template_kwargs",
        messages=(ChatMessage("user", "x"),),
        template_kwargs=b"\xc1",
    ),
    _frame("NaN", "invalid_value", "top_p", sampling=SamplingParams(top_p=float("nan"), seed=1)),
    _frame(
        "infinity", "invalid_value", "temperature", sampling=SamplingParams(temperature=float("inf"), seed=1)
    ),
    _frame("best_of on the wire", "invalid_value", "best_of", sampling=SamplingParams(best_of=2, seed=1)),
    _frame("resumed output too long", "invalid_value", "resume", resume=Resume(pack_ids([1] * 5000), 0)),
)
