"""The vocabulary between the scheduler and the model worker: rows, positions and pages, never a request.

Part of the wire like `runtime.wire.messages`, which puts these into the unions of their sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.sampling.columns import ROW_BYTES, pack_row
from runtime.sampling.features import FEATURE_BITS, HAS_ARRAYS, LOOKS_BACK, MIN_LEN, PROCESSED
from runtime.sampling.table import NEW_STAY, Stay
from runtime.wire.format import Count, Label, Message, Record, ShortText, Text, pack_ids, unpack_ids
from runtime.wire.sampling_params import SamplingParams

TensorName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=80)]
"""Name of a tensor of a request: context_logits, generation_logits or embedding; of an additional output its
name behind `context_` or `generation_`.
"""
OutputNames: TypeAlias = Annotated[tuple[Label, ...], Meta(max_length=16)]
NO_ADAPTER = -1
"""Slot of a row that is computed by the base model alone."""
MAX_PIECE_BYTES = 1 << 20
"""Most bytes of an adapter's weights in one message."""
NO_LORA = "this server serves no LoRA adapters: it was started without --enable-lora"

MAX_PROCESSORS = 8
MAX_ARGS_BYTES = 4096
"""Most bytes of JSON of the arguments of all of a request's logits processors."""
BATCHED = "batched"
"""Name of the logits processor that is called once a step, with all rows that have it."""
PROCESSORS = "logits_processors"
"""Field of a request that names its logits processors."""
PROCESSED_SCORES = "processed_scores"
"""Name of the tensor of what logits processors leave of a row of a beam search."""

MAX_CALL_BYTES = 1 << 20
"""Most bytes of JSON of the arguments of a call to ranks, and of what a rank returns."""
MAX_CALL_S = 3600.0
MAX_RANKS = 1024
CallBytes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_CALL_BYTES)]

_decode_map = msgspec.json.Decoder(dict[str, Any]).decode


class ProcessorCall(Record, frozen=True):
    """A logits processor, by the name that the launch gave it: code never comes in a request."""

    name: Label
    args: Annotated[bytes, Meta(max_length=MAX_ARGS_BYTES)] = b""
    """Keyword arguments of the processor, as a JSON object. Empty for none."""

    def keywords(self) -> dict[str, Any]:
        return _decode_map(self.args) if self.args else {}


ProcessorCalls: TypeAlias = Annotated[tuple[ProcessorCall, ...], Meta(max_length=MAX_PROCESSORS)]


def check_calls(calls: Sequence[ProcessorCall]) -> None:
    """Check the logits processors of a request. Raises InvalidRequest that names its field."""
    if len(calls) > MAX_PROCESSORS:
        raise _wrong_call(f"{len(calls)} of them; at most {MAX_PROCESSORS}")
    num_bytes = sum(len(call.args) for call in calls)
    if num_bytes > MAX_ARGS_BYTES:
        raise _wrong_call(f"their arguments are {num_bytes} bytes of JSON; at most {MAX_ARGS_BYTES}")
    for number, call in enumerate(calls):
        if call.args and call.name == BATCHED:
            raise _wrong_call("the batched processor takes none", f"[{number}].args")
        try:
            call.keywords()
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise _wrong_call("arguments are a JSON object", f"[{number}].args") from None


def _wrong_call(problem: str, where: str = "") -> InvalidRequest:
    return InvalidRequest(f"{PROCESSORS}{where}: {problem}", param=PROCESSORS + where)


class RowProcessing(Record, frozen=True):
    """Logits processors of a row, and the ids of its request, which they alone are told."""

    request_id: Count
    """Number of the sequence, in the order in which they came."""
    client_id: Label
    """The label of its request; empty for none."""
    calls: ProcessorCalls
    searches: bool = False
    """True for the rows of a beam search: its processors are called for all of them at once, with
    log-probabilities, and the scores that they leave are returned.
    """


class ProcessedRow(Record, frozen=True):
    """A row whose logits processors are called in a step, and the tokens that they see: the first `start` of
    another row, or of its own, and `ids`.
    """

    row: Count
    source: Count
    """Row that it goes on from: another one where a beam search has forked."""
    start: Count
    ids: bytes
    """Tokens [n] int32 that the worker has not been told yet."""
    beam: Count = 0
    """Number of its hypothesis among those of the search."""


class RowSetup(Record, frozen=True):
    """News of a row that has a new holder: what the device keeps about it for as long as it stays."""

    row: Count
    num_prompt: Count
    features: Annotated[int, Meta(ge=0, lt=1 << FEATURE_BITS)]
    """Bits of runtime.sampling.features: what its sampling needs."""
    columns: Annotated[bytes, Meta(min_length=ROW_BYTES, max_length=ROW_BYTES)]
    """Sampling numbers of the row, packed as runtime.sampling.columns says."""
    stop_ids: bytes = b""
    """Ids [n] int32 that are not sampled below the position in column `min_len`. Empty when min_tokens is 0.
    """
    bias_ids: bytes = b""
    bias_values: bytes = b""
    """Bias [n] float32 of each id in `bias_ids`."""
    history_ids: bytes = b""
    """Prompt and output so far (prompt first, `num_prompt` of them), only when a feature looks at them."""
    allowed_ids: bytes = b""
    """Ids [n] int32 beside which nothing is sampled. Empty: everything may be."""
    bad_words: tuple[bytes, ...] = ()
    """Words as packed int32 ids: the last id of each is forbidden where the others are the end of the
    context.
    """
    top_p_reset_ids: bytes = b""
    """Ids [n] int32 after which the decaying bound begins again."""
    adapter_slot: Annotated[int, Meta(ge=-1, lt=1 << 31)] = NO_ADAPTER
    """Slot of the adapter that the row's tokens are computed with; NO_ADAPTER: none."""
    processing: RowProcessing | None = None
    """Logits processors that the row's tokens are drawn with."""
    outputs: OutputNames = ()
    """Additional outputs that it wants."""
    prompt_slot: Annotated[int, Meta(ge=-1, lt=1 << 31)] = NO_ADAPTER
    """Slot of the prompt table whose rows the prompt's ids from the vocabulary's size on are."""

    @staticmethod
    def of(
        row: int,
        num_prompt: int,
        sampling: SamplingParams,
        tokens: bytes = b"",
        *,
        min_len: int = 0,
        stop_ids: Collection[int] = (),
        adapter_slot: int = NO_ADAPTER,
        processing: RowProcessing | None = None,
    ) -> RowSetup:
        """Say what the device keeps of a stay.

        tokens: prompt and output so far, packed. min_len: position below which no id of `stop_ids` is
        sampled.
        """
        s = sampling
        age = 0 if s.top_p_decay == 1.0 else RowSetup.top_p_age(tokens, num_prompt, s)
        features, columns = pack_row(s, Stay(min_len, age) if min_len or age else NEW_STAY)
        if stop_ids:
            features |= MIN_LEN
        if processing is not None:
            features |= PROCESSED
        if not features & HAS_ARRAYS and adapter_slot == NO_ADAPTER and not s.additional_outputs:
            return RowSetup(row, num_prompt, features, columns)  # as of nearly all
        return RowSetup(
            row,
            num_prompt,
            features,
            columns,
            pack_ids(sorted(stop_ids)) if stop_ids else b"",
            pack_ids([token for token, _ in s.logit_bias]) if s.logit_bias else b"",
            np.array([bias for _, bias in s.logit_bias], np.float32).tobytes() if s.logit_bias else b"",
            tokens if features & (LOOKS_BACK | PROCESSED) else b"",
            pack_ids(s.allowed_token_ids) if s.allowed_token_ids else b"",
            tuple([pack_ids(word) for word in s.bad_words_ids]) if s.bad_words_ids else (),
            pack_ids(s.top_p_reset_ids) if s.top_p_reset_ids else b"",
            adapter_slot,
            processing,
            s.additional_outputs,
        )

    @staticmethod
    def top_p_age(tokens: bytes, num_prompt: int, sampling: SamplingParams) -> int:
        """Count the output tokens after the last one that resets the decay."""
        output = unpack_ids(tokens)[num_prompt:]
        resets = np.flatnonzero(np.isin(output, sampling.top_p_reset_ids))
        return len(output) - (resets.item(-1) + 1 if len(resets) else 0)


class PromptPositions(Record, frozen=True):
    """Positions of a chunk of prompt whose logits are looked at, although nothing is sampled there."""

    index: Count
    """Place of its row in the plan's `rows`."""
    first: Count
    """Place of the first of them in the row's chunk; they go on to its last token that is no guess."""
    targets: bytes
    """Ids [n] int32 of the prompt's next token at each position, whose logprob is asked for. Of the prompt's
    last position, which has none, 0.
    """
    num_logprobs: Annotated[int, Meta(ge=-1)] = -1
    """Number of most likely ids whose logprobs are returned beside the target's; -1: no logprobs at all."""
    returns_logits: bool = False
    """True where the raw logits of all these positions are returned."""
    returns_outputs: bool = False
    """True where the additional outputs of the row are returned at these positions."""


class BatchPlan(Message, frozen=True):
    """One forward step, by row: first the decodes, then the rest. The device changes its tables in the order
    of the fields.

    A decode computes one token, samples one and has nothing to verify; so lens, samples and drafts exist for
    the rest only. All packed arrays are int32.
    """

    step: Count
    setups: tuple[RowSetup, ...]
    page_copies: tuple[tuple[int, int], ...]
    table_spans: bytes
    """Changes of the page table, [num_spans, 3] (row, start, n): page_table[row, start:start + n] = the next
    n of table_pages.
    """
    table_pages: bytes
    num_decodes: Count
    rows: bytes
    """Rows [num_rows] of the step, decodes first."""
    starts: bytes
    """Position [num_rows] of each row's first new token, which is the length of its KV before the step."""
    input_ids: bytes
    """Ids [num_decodes + sum(lens)] of the new tokens; -1 stands for FutureMap[row]."""
    lens: bytes = b""
    """New tokens [num_rest] of each row that is no decode."""
    samples: bytes = b""
    """Number [num_rest] of tokens to sample of each row that is no decode: 1 for the last chunk of a prompt,
    else 0.
    """
    drafts: bytes = b""
    """Number [num_rest] of trailing input ids of each row that are guesses to verify; of a row that samples
    they stand behind a token or more that are known.
    """
    prompt_positions: tuple[PromptPositions, ...] = ()
    defer_sampling: bool = False
    """True where masks or tokens are still to come of the host: run the forward, sample when SampleMasks
    arrives.
    """
    profiled: bool = False
    """True where the result is to say what took how long."""


class SampleMasks(Message, frozen=True):
    """The masks that a plan with `defer_sampling` waits for, and the tokens that logits processors see."""

    step: Count
    masks: tuple[tuple[int, bytes | Count], ...]
    """Masks as (row, bitmask): int32 words, bit i of word j allows token 32 * j + i. Or the slot of `memory`
    in which the mask lies. Of a row with guesses the next one is for the place behind its first guess, and so
    on; places behind the last one have none, and their tokens are not wanted.
    """
    processed: tuple[ProcessedRow, ...] = ()
    """Rows whose logits processors are called."""
    memory: Label = ""
    """See runtime.base.mask_memory."""


class AdapterRef(Record, frozen=True):
    """Name of a version of an adapter's files."""

    name: Label
    id: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    """Number that the caller gave the adapter; one id is one path. With an empty name it is the number of
    weights that came with a request.
    """
    version: Annotated[str, Meta(max_length=64)]
    """Digest of the files (runtime.checkpoint.adapters): other files are another version."""
    path: Annotated[str, Meta(max_length=4096)]
    """Directory with adapter_config.json and adapter_model.safetensors."""
    pinned: bool = False
    """True where the adapter keeps its slot, once it has one: others do not take it."""
    num_rows: Count = 0
    """Ranks of all modules of the adapter, added up; the tokenizer says it."""
    num_virtual: Count = 0
    """Number of vectors of a prompt table, which stand for the ids from the vocabulary's size on; 0: it is a
    LoRA. The tokenizer says it.
    """


class AdapterPiece(Record, frozen=True):
    """Part of an adapter's weights, on its way into the run directory. The first one has the config."""

    kind: Literal["lora", "prompt"]
    task_id: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the adapter's config and weights."""
    size: Annotated[int, Meta(ge=1, lt=1 << 48)]
    """Bytes of all the adapter's weights."""
    config: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)] = b""
    offset: Annotated[int, Meta(ge=0, lt=1 << 48)] = 0
    data: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)] = b""
    """Bytes of the weights from the offset on; none asks whether the adapter is there."""
    folder: Annotated[str, Meta(max_length=64)] = ""
    """Directory among those that are on their way in which a client of this machine has written it all."""
    num_rows: Count = 0
    """Ranks of all modules, as AdapterRef.num_rows; set by the tokenizer for the scheduler."""
    path: Annotated[str, Meta(max_length=4096)] = ""
    """Directory in which the complete adapter lies; set by the tokenizer for the scheduler."""


class LoadAdapter(Message, frozen=True):
    """Read an adapter into a slot, in the place of the one that is there. Plans launched before still compute
    with that one. Answered by an AdapterLoaded or an AdapterFailed.
    """

    slot: Count
    ref: AdapterRef
    number: Count = 0
    """Number of the load, which its answers have."""


class DropAdapter(Message, frozen=True):
    """Order to give back the memory of a slot, which nothing that is launched later uses."""

    slot: Count


class AdapterLoaded(Message, frozen=True):
    """News that plans which are launched from now on may use the slot."""

    rank: Count
    slot: Count
    version: str
    num_bytes: Annotated[int, Meta(ge=0)]
    """Bytes of memory that the adapter takes on the device of this rank."""
    load_s: Annotated[float, Meta(ge=0.0)]
    number: Count = 0


class AdapterFailed(Message, frozen=True):
    """News that the adapter cannot be served; the slot is empty."""

    rank: Count
    slot: Count
    version: str
    message: ShortText
    number: Count = 0


class RankCall(Record, frozen=True):
    """A method that ranks are asked to run."""

    method: Label
    arguments: CallBytes
    """Arguments of the method in JSON: a list of the positional ones and of an object of those by keyword."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=MAX_CALL_S)]
    """Seconds in which all of the ranks have to answer."""
    ranks: Annotated[tuple[Count, ...], Meta(max_length=MAX_RANKS)] = ()
    """Ranks that are called; empty for all."""


class CallRank(Message, frozen=True):
    """Call a method on this rank, between the plan before it and the one after it. Answered by RankAnswer."""

    number: Count
    """Number of the call, which its answers have."""
    method: Label
    arguments: CallBytes


class RankAnswer(Message, frozen=True):
    """The value or the error of a call on one rank."""

    rank: Count
    number: Count
    value: CallBytes = b""
    """Value that the method has returned, in JSON."""
    error: ShortText = ""
    """Type and text of the exception that the method has raised; empty where it has returned."""


class WorkerCommand(Message, frozen=True):
    op: Literal["shutdown"]


class ChunkLogprobs(Record, frozen=True):
    """Log-probabilities of one entry of the plan's `prompt_positions` that asked for them."""

    index: Count
    logprobs: bytes
    """Logprobs [n] float32 of the targets."""
    top_ids: bytes = b""
    """Ids [n, k] int32 of the most likely tokens in the place of each target, most likely first."""
    top_logprobs: bytes = b""
    """Logprobs [n, k] float32 of `top_ids`."""


SpanName: TypeAlias = Literal["forward", "sample", "copy"]


class StepSpan(Record, frozen=True):
    """Time that some work of the worker took, from when to when, in CLOCK_MONOTONIC."""

    name: SpanName
    begin_ns: Annotated[int, Meta(ge=0)]
    end_ns: Annotated[int, Meta(ge=0)]


class StepTensor(Record, frozen=True):
    """Describes one frame of float32 that travels behind its StepResult: raw logits, rows of an additional
    output, or an embedding.
    """

    index: Count
    """Place of its row in the plan's `rows`."""
    name: TensorName
    start: Count
    """Position in the sequence of the tensor's first row: of an input token, or, of generation logits, of the
    sampled token. 0 for an embedding.
    """
    shape: tuple[Count, Count]
    """Shape of the tensor: [positions, vocab_size]; of an embedding [1, hidden_size], of an additional output
    [positions, its width].
    """


class StepResult(Message, frozen=True):
    """Results of a step: one token per decode, then those of the rest, in the plan's order: of a row with
    guesses those that were right, and one more.
    """

    step: Count
    tokens: bytes
    """Sampled ids [num_decodes + sum(counts)] int32."""
    counts: bytes = b""
    """Number [num_rest] int32 of tokens of each row that is no decode; 0 where none was sampled, and of one
    with guesses at least 1.
    """
    logprobs: bytes = b""
    """Logprobs [m] float32 of the tokens of rows that asked for logprobs, in order."""
    num_top: Count = 0
    top_ids: bytes = b""
    """Ids [m, num_top] int32 of the most likely tokens, most likely first; a row that asked for fewer uses
    its first ones.
    """
    top_logprobs: bytes = b""
    prompts: tuple[ChunkLogprobs, ...] = ()
    tensors: tuple[StepTensor, ...] = ()
    """Descriptions of the raw frames that follow, one for each."""
    spans: tuple[StepSpan, ...] = ()
    """Spans of a plan that is `profiled`."""
    errors: tuple[tuple[Count, ShortText], ...] = ()
    """Failures as (place of a row in the plan's `rows`, why its token counts for nothing)."""

    @property
    def num_frames(self) -> int:
        return len(self.tensors)


class WorkerReady(Message, frozen=True):
    num_pages: Count
    """Pages of KV that may be handed out (the dummy page 0 not counted)."""
    page_size: Count
    max_rows: Count
    max_len: Count
    vocab_size: Count
    device: Label = ""
    attention_window: Count = 0
    """Number of a sequence's last tokens that the layer which looks back the farthest sees, the newest
    included; 0: one sees all.
    """
    output_width: Count = 0
    """Numbers in a row of an additional output."""
    num_adapted_modules: Count = 0
    """Linear layers of the checkpoint that adapters may change; 0: none are served."""
    adapter_rows: Count = 0
    """Rows of adapters, one for each rank of each module, that --lora-device-percent leaves room for; 0: it
    says nothing.
    """
    adapter_row_bytes: Count = 0
    """Most bytes that an adapter of rank 1 takes on one linear layer, on all ranks together."""


class WorkerFailed(Message, frozen=True):
    message: Text
