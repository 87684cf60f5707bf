"""Frames of a broken or hostile peer: mutations of valid frames of every union."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from runtime.ring.process import FIRST_EPOCH
from runtime.wire.format import HEADER_BYTES, PROTOCOL_VERSION, Message, pack_ids
from runtime.wire.guide import Guide, MatcherNews
from runtime.wire.handle import make_handle
from runtime.wire.messages import (
    UNIONS,
    AbortRequest,
    AdvanceMatchers,
    ChatMessage,
    Closed,
    CloseMatcher,
    ControlReply,
    ControlRequest,
    ErrorInfo,
    GenerateRequest,
    GuideRefused,
    Hello,
    OpenMatcher,
    Ping,
    ProcessFailed,
    ProcessReady,
    RequestFailed,
    Resume,
    StopMatched,
    StreamOpen,
    TokenBatch,
    TokenizedRequest,
    TokenLogprobs,
)
from runtime.wire.plan import BatchPlan, MasksAwaited, RowSetup, SampleMasks, StepResult, WorkerReady
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import SCHEMA, MessageCodec

HANDLE = make_handle(12345, 6)
SAMPLING = SamplingParams(
    seed=1, max_tokens=2, stop=("END",), stop_token_ids=(5,), logit_bias=((7, 1.5),), logprobs=2
)
STEP = 1 << 30
RESUME = Resume(pack_ids([4, 5]), 3, -1.5, 0)


def _raw(record: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(record))


def samples() -> dict[str, list[Message]]:
    """Good messages of each socket that a peer can reach, all of a client that nobody knows."""
    opened = StreamOpen(
        HANDLE,
        3,
        pack_ids([1, 2, 3]),
        "label",
        stream=True,
        stop=("END",),
        stop_words=(pack_ids([9, 8]),),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        min_tokens=1,
        resume=RESUME,
    )
    packed = b"\0\0\x80\xbf"
    return {
        "tokenizer_in": [
            GenerateRequest(HANDLE, SAMPLING, text="def f(x):", label="a", stream=True, resume=RESUME),
            GenerateRequest(HANDLE, SAMPLING, input_ids=pack_ids([1, 2, 3]), cache_salt="salt"),
            GenerateRequest(HANDLE, SAMPLING, messages=(ChatMessage("user", "x", "name"),)),
            AbortRequest((HANDLE,), 12345),
            ControlRequest(12345, 1, "server_info"),
        ],
        "scheduler_in": [
            TokenizedRequest(
                HANDLE, pack_ids([1, 2, 3]), SAMPLING, _raw(opened), 3, b"n" * 16, pack_ids([4]), 0
            ),
            TokenizedRequest(HANDLE, pack_ids([7]), SAMPLING, _raw(opened)),
            AbortRequest((HANDLE,), 12345),
            StopMatched(HANDLE, 2),
            GuideRefused(HANDLE, ErrorInfo("no")),
            ControlRequest(12345, 1, "flush_cache"),
        ],
        "grammar_in": [
            OpenMatcher(HANDLE, Guide("regex", "a+"), pack_ids([1])),
            OpenMatcher(HANDLE, Guide("json_schema", '{"type": "object"}')),
            AdvanceMatchers((MatcherNews(HANDLE, 2, pack_ids([1]), pack_ids([1, 2])),)),
            CloseMatcher(HANDLE),
        ],
        "detokenizer_in": [
            TokenBatch(1, HANDLE * 2, pack_ids([5, 6]), (_raw(opened),), epoch=FIRST_EPOCH),
            TokenBatch(
                2,
                HANDLE,
                pack_ids([5]),
                (_raw(opened),),
                (TokenLogprobs(HANDLE, packed, pack_ids([1, 2]), packed * 2),),
                (Closed(HANDLE, "stop", 5, 16, ErrorInfo("no")),),
                epoch=FIRST_EPOCH,
            ),
            RequestFailed(HANDLE, ErrorInfo("no", "invalid_value", "top_p", 400)),
            ControlReply(12345, 1, _raw({"a": 1})),
        ],
        "client_in": [Hello(PROTOCOL_VERSION, SCHEMA.hex()), Ping(12345)],
        # Steps far from those that run: who knows their numbers is the engine itself. For the same reason
        # there is no WorkerCommand, WorkerFailed or ProcessFailed that names a process: each is an order.
        "rank_in": [_plan(), SampleMasks(STEP, ((1, packed),))],
        "step_results": [
            StepResult(STEP, pack_ids([5, 6]), pack_ids([1]), packed, 1, pack_ids([7]), packed),
            MasksAwaited(STEP),
            WorkerReady(8, 16, 4, 64, 300),
        ],
        "launcher_in": [
            ProcessReady("tokenizer", 1, {"num_pages": 3}),
            ProcessFailed("nobody", "no reason", 70),
        ],
    }


def _plan() -> BatchPlan:
    setup = RowSetup.of(1, 3, SAMPLING)
    ids = pack_ids([1, 2, 3])
    return BatchPlan(STEP, (setup,), (), ids, pack_ids([4]), 1, pack_ids([1]), pack_ids([2]), pack_ids([5]))


def hostile_frames(name: str, epoch: int, count: int, rng: random.Random) -> Iterator[list[bytes]]:
    """`count` messages for the socket `name`, each a list of frames; one in 16 is of several frames."""
    codec = MessageCodec(UNIONS[name], epoch)
    good = [codec.encode(message) for message in samples()[name]]
    for _ in range(count):
        if rng.random() < 1 / 16:
            yield [rng.choice(good) if rng.random() < 0.5 else b"" for _ in range(rng.randrange(2, 64))]
        else:
            yield [_mutated(rng.choice(good), good, rng)]


def _mutated(frame: bytes, good: list[bytes], rng: random.Random) -> bytes:
    # Most damage behind the header, where it is not found at once.
    low = 0 if rng.random() < 0.1 else HEADER_BYTES
    data = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(low, max(low + 1, len(data)))
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + rng.randrange(8)] = rng.randbytes(rng.randrange(8))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            other = rng.choice(good)
            data[at:] = other[rng.randrange(len(other)) :]
        else:
            data[at : at + 1] = bytes([rng.choice([0x80, 0x90, 0x9F, 0xC0, 0xC1, 0xC4, 0xDD, 0xDF, 0xFF])])
    return bytes(data)
