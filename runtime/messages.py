"""The message vocabulary: everything that crosses a process border, one union per socket.

Bulk integers travel as packed little-endian bytes (`wire.pack_ids`): a 256-row step encodes in under a
microsecond. Every string, list and integer that an outsider can send is bounded here; a decoder refuses what
is out of bounds before it allocates. What a process only passes on is `msgspec.Raw`, so ownership is visible
in the type.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Raw, field

from runtime.sampling_params import SamplingParams
from runtime.wire import TURNS, ClientId, Count, Handle, Label, Message, PackedIds, Record, ShortText, Text

# -- what a client asks ------------------------------------------------------------------------------------


class Resume(Record, frozen=True):
    """What the client already has of a sequence it submits again after a process was restarted."""

    output_ids: PackedIds = b""
    num_chars: Count = 0
    """Characters of output text delivered; the detokenizer
    replays `output_ids` and emits from this character on.
    """
    cumulative_logprob: float = 0.0
    num_prompt_logprobs: Count = 0
    cached_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    """As first reported; -1 when it was not reported yet."""


class ChatMessage(Record, frozen=True):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Text
    name: Label = ""


class GenerateRequest(Message, frozen=True):
    """One sequence to generate. Exactly one terminal message answers it."""

    handle: Handle
    sampling: SamplingParams
    text: Text | None = None
    """The prompt, in exactly one of three forms: text,"""
    input_ids: PackedIds | None = None
    """packed token ids,"""
    messages: Annotated[tuple[ChatMessage, ...], TURNS] | None = None
    """or a conversation for the model's chat template."""
    label: Label = ""
    """The user's own id; echoed, never used to find anything."""
    stream: bool = False
    """False: one OutputBatch entry at the end. True: an entry whenever there is something new."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    cache_salt: Label = ""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    resume: Resume | None = None


class AbortRequest(Message, frozen=True):
    """End these sequences, or all sequences of a client. What is unknown leaves a short-lived tombstone."""

    handles: Annotated[tuple[Handle, ...], Meta(max_length=4096)] = ()
    client: ClientId = 0


class ControlRequest(Message, frozen=True):
    """Ask the ring itself. Answered by one ControlReply with the same client and number."""

    client: ClientId
    number: Count
    op: Literal["server_info", "flush_cache"]


# -- tokenizer → scheduler → detokenizer -------------------------------------------------------------------


class StreamOpen(Record, frozen=True):
    """What the detokenizer needs to know about a sequence. The scheduler carries it without reading it."""

    handle: Handle
    num_prompt_tokens: Count
    prompt_tail: PackedIds = b""
    """The last few prompt ids: the context in which the first output token is decoded."""
    label: Label = ""
    stream: bool = False
    stop: Annotated[tuple[ShortText, ...], Meta(max_length=64)] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: Count = 0
    resume: Resume | None = None


class TokenizedRequest(Message, frozen=True):
    """A checked request in token ids."""

    handle: Handle
    input_ids: PackedIds
    sampling: SamplingParams
    """Its seed is set: the client library draws one where the user gave none."""
    stream_open: Raw
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    namespace: Annotated[bytes, Meta(max_length=64)] = b""
    """Keyed digest of tenant, salt and adapter; requests of different namespaces never share a page."""
    output_ids: PackedIds = b""
    """Output that an earlier attempt already delivered: counted as output, never as prompt."""
    cached_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1


class StopMatched(Message, frozen=True):
    """A stop string was completed by the sequence's `num_tokens`-th output token."""

    handle: Handle
    num_tokens: Count


class ErrorInfo(Record, frozen=True):
    message: ShortText
    code: Annotated[str, Meta(max_length=128)] = "internal_error"
    param: Annotated[str, Meta(max_length=256)] | None = None
    status: Annotated[int, Meta(ge=400, le=599)] = 500


class Closed(Record, frozen=True):
    """The scheduler has let go of a sequence; nothing follows for this handle."""

    handle: Handle
    reason: Literal["stop", "length", "abort", "stop_string", "error"]
    stop_token: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    """The id that stopped it, for reason `stop`."""
    cached_tokens: Count = 0
    error: ErrorInfo | None = None


class TokenLogprobs(Record, frozen=True):
    """Logprobs of the tokens that this step gave one sequence."""

    handle: Handle
    logprobs: bytes
    """[n] float32."""
    top_ids: bytes = b""
    """[n, k] int32, most likely first."""
    top_logprobs: bytes = b""
    """[n, k] float32."""


class TokenBatch(Message, frozen=True):
    """Everything one step has to tell the detokenizer. Read
    in the order: opened, tokens with logprobs, closed.
    """

    step: Count
    handles: bytes = b""
    """[n, 16] whose token it is; a sequence that got several tokens stands several times, in order."""
    tokens: bytes = b""
    """[n] int32."""
    opened: tuple[Raw, ...] = ()
    """StreamOpen of each sequence the scheduler took in."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    closed: tuple[Closed, ...] = ()


class RequestFailed(Message, frozen=True):
    """A sequence that never reached the scheduler."""

    handle: Handle
    error: ErrorInfo


class ControlReply(Message, frozen=True):
    client: ClientId
    number: Count
    body: Raw
    """JSON-like data of the operation; an ErrorInfo when `ok` is false."""
    ok: bool = True


# -- detokenizer ↔ client ----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection, before anything else is decoded."""

    version: Count
    schema: Annotated[str, Meta(max_length=64)]


class HelloAck(Message, frozen=True):
    client: ClientId
    """Drawn by the server; every handle of this connection starts with it."""
    epoch: Count
    version: Count
    schema: Annotated[str, Meta(max_length=64)]


class Ping(Message, frozen=True):
    """Sent each second both ways; a peer that is silent for 15 s is gone."""

    client: ClientId = 0


class Usage(Record, frozen=True):
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0


class Finish(Record, frozen=True):
    """The terminal part of a sequence's last output."""

    reason: Literal["stop", "length", "abort", "error"]
    usage: Usage
    matched: str | int | None = None
    """The stop string or stop token id, None when the model ended by its own end token."""
    cumulative_logprob: float | None = None
    error: ErrorInfo | None = None


class SequenceOutput(Record, frozen=True):
    """What is new of one sequence since its last output."""

    handle: Handle
    text: str = ""
    token_ids: bytes = b""
    logprobs: bytes = b""
    """[n] float32, one for each of token_ids, when asked for."""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    finish: Finish | None = None


class OutputBatch(Message, frozen=True):
    outputs: tuple[SequenceOutput, ...]


class RingStatus(Message, frozen=True):
    """The status page for clients that cannot read the file: the scheduler's slot."""

    state: Annotated[str, Meta(max_length=32)]
    num_running: Count
    num_waiting: Count
    num_free_pages: Count


# -- scheduler ↔ worker ------------------------------------------------------------------------------------


class RowSetup(Record, frozen=True):
    """A row has a new tenant: what the device keeps about it for as long as it stays."""

    row: Count
    num_prompt: Count
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_len: Count = 0
    """No stop id is sampled at a position below this one (prompt length + min_tokens)."""
    stop_ids: bytes = b""
    """[n] int32: what min_len forbids. Empty when min_tokens is 0."""
    bias_ids: bytes = b""
    bias_values: bytes = b""
    """[n] float32."""
    num_logprobs: Annotated[int, Meta(ge=-1)] = -1
    """-1: none; k: the chosen token's and the k most likely ones'."""
    penalty_ids: bytes = b""
    """Prompt and output so far (prompt first, `num_prompt` of them), only when a penalty is set."""


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
    """[num_spans, 3] row, start, n: page_table[row, start:start + n] = the next n of table_pages."""
    table_pages: bytes
    num_decodes: Count
    rows: bytes
    """[num_rows]"""
    starts: bytes
    """[num_rows] position of the first new token = KV length before the step."""
    input_ids: bytes
    """[num_decodes + sum(lens)]; -1 = FutureMap[row]."""
    lens: bytes = b""
    """[num_rest] new tokens in this step."""
    samples: bytes = b""
    """[num_rest] 1: the last chunk, sample a token."""
    drafts: bytes = b""
    """[num_rest] trailing input ids that are guesses to verify."""
    defer_sampling: bool = False
    """Masks made by the host are still to come: run the forward, sample when SampleMasks arrives."""


class SampleMasks(Message, frozen=True):
    """The masks that a plan with `defer_sampling` waits for."""

    step: Count
    masks: tuple[tuple[int, bytes], ...]
    """(row, bitmask): int32 words, bit i of word j allows token 32 * j + i."""


class WorkerCommand(Message, frozen=True):
    op: Literal["shutdown"]


class StepResult(Message, frozen=True):
    """What a step sampled: one token per decode, then those of the rest, in the plan's order."""

    step: Count
    tokens: bytes
    """[num_decodes + sum(counts)] int32."""
    counts: bytes = b""
    """[num_rest] int32: how many tokens each row of the rest has; 0 where none was sampled."""
    logprobs: bytes = b""
    """[m] float32: for the tokens of rows that asked for logprobs, in order."""
    num_top: Count = 0
    top_ids: bytes = b""
    """[m, num_top] int32, most likely first; a row that asked for fewer uses its first ones."""
    top_logprobs: bytes = b""


class WorkerReady(Message, frozen=True):
    num_pages: Count
    """Pages of KV that may be handed out (the dummy page 0 not counted)."""
    page_size: Count
    max_rows: Count
    max_len: Count
    vocab_size: Count
    device: Label = ""


class WorkerFailed(Message, frozen=True):
    message: Text


# -- large tensors -----------------------------------------------------------------------------------------


class TensorEntry(Record, frozen=True):
    handle: Handle
    name: Label
    dtype: Literal["float32", "float16", "bfloat16", "int32", "int64", "uint8"]
    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]


class TensorBatch(Message, frozen=True):
    """Describes the raw frames that follow it in the same multipart message, one per entry, in order."""

    entries: Annotated[tuple[TensorEntry, ...], Meta(max_length=64)]


# -- launcher ----------------------------------------------------------------------------------------------


class ProcessReady(Message, frozen=True):
    role: Label
    pid: Count
    info: dict[str, int | float | str] = field(default_factory=dict)


class ProcessFailed(Message, frozen=True):
    role: Label
    message: Text
    exit_code: Count


ToTokenizer: TypeAlias = GenerateRequest | AbortRequest | ControlRequest
ToScheduler: TypeAlias = TokenizedRequest | AbortRequest | StopMatched | ControlRequest
ToDetokenizer: TypeAlias = TokenBatch | RequestFailed | ControlReply | TensorBatch
FromClient: TypeAlias = Hello | Ping
ToClient: TypeAlias = HelloAck | OutputBatch | ControlReply | Ping | RingStatus | TensorBatch
ToRank: TypeAlias = BatchPlan | SampleMasks | WorkerCommand
FromRank: TypeAlias = StepResult | WorkerReady | WorkerFailed | TensorBatch
ToLauncher: TypeAlias = ProcessReady | ProcessFailed

UNIONS = {
    "tokenizer_in": ToTokenizer,
    "scheduler_in": ToScheduler,
    "detokenizer_in": ToDetokenizer,
    "client_out": ToClient,
    "client_in": FromClient,
    "rank_in": ToRank,
    "step_results": FromRank,
    "launcher_in": ToLauncher,
}
