"""The wire: every message of every union survives the trip, and what no union allows is refused."""

from __future__ import annotations

import random
import typing
from typing import Any

import msgspec
import pytest

from runtime.base.errors import ProtocolMismatch
from runtime.sampling.table import MAX_SEQUENCES
from runtime.wire import messages, plan
from runtime.wire.format import HEADER_BYTES, Message, header, pack_ids, schema_hash, unpack_ids
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from runtime.wire.handle import (
    MAX_ATTEMPT,
    MAX_INDEX,
    attempt_of,
    client_of,
    describe,
    make_handle,
    sequence_key,
    split_handle,
    with_attempt,
)
from runtime.wire.hypotheses import FROM_THE_START, BranchMatchers, BranchStates, HypothesisSoFar
from runtime.wire.messages import UNIONS, GiveWay
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import RingStatus
from runtime.wire.transport import DECODE_ERRORS, SCHEMA, MessageCodec
from tests.harness.cases import for_each

HANDLE = make_handle(client=(1 << 63) - 1, seq=7, index=2, attempt=3)
RESUME = messages.Resume(pack_ids([1]), 3)
FINISH = messages.Finish("stop", messages.Usage(1, 1), 5)
RAW = msgspec.Raw(msgspec.msgpack.encode({"any": "thing"}))

SAMPLES: list[Message] = [
    messages.GenerateRequest(
        HANDLE, SamplingParams(seed=1), text="hi", resume=messages.Resume(pack_ids([1]), 3)
    ),
    messages.GenerateRequest(HANDLE, SamplingParams(), messages=(messages.ChatMessage("user", "hi"),)),
    messages.AbortRequest((HANDLE,)),
    messages.ControlRequest(5, 1, "server_info"),
    messages.TokenizedRequest(HANDLE, pack_ids([1, 2]), SamplingParams(seed=1), RAW, namespace=b"n"),
    messages.StopMatched(HANDLE, 4),
    messages.GuideRefused(HANDLE, messages.ErrorInfo("why")),
    messages.ForgetMatchers(),
    messages.OpenMatcher(HANDLE, Guide("regex", "a+"), pack_ids([1])),
    messages.AdvanceMatchers((MatcherNews(HANDLE, 2, pack_ids([1]), pack_ids([4])),)),
    messages.CloseMatcher(HANDLE),
    BranchMatchers(HANDLE, 2, ((0, pack_ids([1])), (FROM_THE_START, pack_ids([1, 2])))),
    BranchStates(HANDLE, 2, (b"\xff", b""), (False, True)),
    messages.MatcherStates((MatcherState(HANDLE, 2, (b"\xff", 7), (True, False), pack_ids([4])),)),
    messages.GrammarStarted(),
    messages.TokenBatch(
        3,
        HANDLE,
        pack_ids([9]),
        opened=(RAW,),
        logprobs=(messages.TokenLogprobs(HANDLE, b"abcd"),),
        closed=(messages.Closed(HANDLE, "error", error=messages.ErrorInfo("why")),),
        shown=(HypothesisSoFar(HANDLE, pack_ids([9])),),
    ),
    messages.RequestFailed(HANDLE, messages.ErrorInfo("why", "code", "param", 400)),
    messages.ControlReply(5, 1, RAW),
    messages.Hello(1, "00"),
    messages.HelloAck(5, 1, 1, "00"),
    messages.Ping(5),
    messages.OutputBatch((messages.SequenceOutput(HANDLE, "t", pack_ids([1]), finish=FINISH),)),
    RingStatus("ready", 1, 2, 3),
    GiveWay(1, aborts=True),
    plan.BatchPlan(
        0,
        (plan.RowSetup.of(1, 5, SamplingParams(logit_bias=((3, 1.0),))),),
        ((1, 2),),
        b"",
        b"",
        1,
        pack_ids([0]),
        pack_ids([5]),
        b"",
    ),
    plan.SampleMasks(0, ((1, b"\xff"),)),
    plan.LoadAdapter(2, plan.AdapterRef("name", 1, "version", "/adapters/name")),
    plan.CallRank(3, "ping", b"[[],{}]"),
    plan.RankAnswer(1, 3, b"7"),
    plan.DropAdapter(2),
    plan.WorkerCommand("shutdown"),
    plan.StepResult(0, pack_ids([1]), num_top=2, top_ids=pack_ids([1, 2])),
    plan.MasksAwaited(7),
    plan.AdapterLoaded(0, 2, "version", 1 << 40, 0.5),
    plan.AdapterFailed(0, 2, "version", "why"),
    plan.WorkerReady(10, 16, 4, 2048, 4096, "cpu"),
    plan.WorkerFailed("why"),
    messages.TensorBatch((messages.TensorEntry(HANDLE, "context_logits", "float32", (2, 3), 0),)),
    messages.ProcessReady("worker", 1, {"num_pages": 3}),
    messages.ProcessFailed("worker", "why", 70),
]


def classes(union: Any) -> set[type]:
    return set(typing.get_args(union))


@for_each("name", UNIONS)
def test_every_message_of_a_union_survives_the_trip(name: str) -> None:
    codec = MessageCodec(UNIONS[name], epoch=4)
    samples = [sample for sample in SAMPLES if type(sample) in classes(UNIONS[name])]
    assert {type(sample) for sample in samples} == classes(UNIONS[name]), "a message without a sample"
    for sample in samples:
        frame = codec.encode(sample)
        again = codec.decode(frame)
        assert type(again) is type(sample)
        assert codec.encode(again) == frame


@for_each("name", UNIONS)
def test_messages_of_other_sockets_are_refused(name: str) -> None:
    codec = MessageCodec(UNIONS[name], epoch=0)
    for sample in SAMPLES:
        if type(sample) not in classes(UNIONS[name]):
            with pytest.raises(msgspec.ValidationError):
                codec.decode(codec.encode(sample))


def test_other_version_schema_or_epoch_is_refused_before_decoding() -> None:
    codec = MessageCodec(UNIONS["scheduler_in"], epoch=2)
    body = codec.encode(SAMPLES[2])[HEADER_BYTES:]
    assert codec.decode(header(SCHEMA, 2) + body) == SAMPLES[2]
    for wrong in (
        header(SCHEMA, 1),
        header(b"\0" * 6, 2),
        b"CRSL\x63\0" + header(SCHEMA, 2)[6:],
        b"",
        b"HTTP/1.1 400 Bad",
    ):
        with pytest.raises(ProtocolMismatch):
            codec.decode(wrong + body)
    assert codec.decode(header(SCHEMA, 1) + body, any_epoch=True) == SAMPLES[2]


def test_schema_hash_changes_with_any_field_or_bound() -> None:
    class Before(Message, frozen=True, tag="m"):
        x: int

    class Renamed(Message, frozen=True, tag="m"):
        y: int

    class Bounded(Message, frozen=True, tag="m"):
        x: typing.Annotated[int, msgspec.Meta(ge=0)]

    hashes = {schema_hash([kind]) for kind in (Before, Renamed, Bounded)}
    assert len(hashes) == 3


@for_each(
    "body",
    [
        ["GenerateRequest", b"short", list(msgspec.to_builtins(SamplingParams()))],
        ["AbortRequest", [b"x" * 17]],
        ["AbortRequest", [b"x" * 16] * 5000],
        ["AbortRequest", [], -1],
        ["AbortRequest", [], 0, "tenant", "one field too many"],
        ["ControlRequest", 1, 1, "rm -rf"],
        ["ControlRequest", True, 1, "server_info"],
        ["NoSuchMessage"],
        [],
        {},
        7,
    ],
)
def test_what_is_out_of_bounds_is_refused(body: Any) -> None:
    codec = MessageCodec(UNIONS["tokenizer_in"], epoch=0)
    with pytest.raises(DECODE_ERRORS):
        codec.decode(codec.header + msgspec.msgpack.encode(body))


def test_mutated_frames_raise_only_known_errors() -> None:
    """20,000 random mutations of good frames: each decodes to
    a message or raises one of the errors that inboxes catch.
    """
    rng = random.Random(0)
    codecs = {name: MessageCodec(union, 0) for name, union in UNIONS.items()}
    frames = [
        (name, codecs[name].encode(s)) for name, u in UNIONS.items() for s in SAMPLES if type(s) in classes(u)
    ]
    refused = 0
    for _ in range(20_000):
        name, frame = rng.choice(frames)
        data = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(HEADER_BYTES, len(data))] = rng.randrange(256)
        try:
            codecs[name].decode(bytes(data[: rng.randrange(HEADER_BYTES, len(data) + 1)]))
        except DECODE_ERRORS:
            refused += 1
    assert refused > 10_000


def test_handle_carries_its_parts() -> None:
    assert len(HANDLE) == 16
    assert split_handle(HANDLE) == ((1 << 63) - 1, 7, 2, 3)
    assert client_of(HANDLE) == (1 << 63) - 1
    assert attempt_of(HANDLE) == 3
    last = with_attempt(HANDLE, MAX_ATTEMPT)
    assert split_handle(last) == ((1 << 63) - 1, 7, 2, 65535)
    assert (attempt_of(last), sequence_key(last)) == (65535, sequence_key(HANDLE))
    assert sequence_key(HANDLE) == sequence_key(make_handle((1 << 63) - 1, 7, 2, 0))
    assert describe(HANDLE) == "#7.2/3"


def test_every_sequence_of_a_request_has_an_index() -> None:
    assert MAX_INDEX >= MAX_SEQUENCES - 1


def test_packed_ids_survive_the_trip() -> None:
    assert unpack_ids(pack_ids([0, 5, -1, 2**31 - 1])).tolist() == [0, 5, -1, 2**31 - 1]
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"abc")
