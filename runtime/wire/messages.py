"""The message vocabulary: everything that crosses a process border, one union per socket.

Bulk integers travel as packed little-endian bytes (`wire.pack_ids`): a 256-row step encodes in under a
microsecond. Every string, list and integer that an outsider can send is bounded here; a decoder refuses a
value out of bounds before it allocates. A field that a process only passes on is `msgspec.Raw`, so that the
type shows who reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Raw, field
from msgspec.structs import astuple

from runtime.wire.format import (
    MAX_PROMPT_TOKENS,
    NO_CONTENT,
    TURNS,
    ClientId,
    Content,
    Count,
    Handle,
    Label,
    Message,
    PackedIds,
    Priority,
    Record,
    ShortText,
    Text,
)
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from runtime.wire.handle import MAX_ABORT_HANDLES
from runtime.wire.hypotheses import BeamScore, BranchMatchers, BranchStates, HypothesisSoFar
from runtime.wire.perf_metrics import RequestPerfMetrics, TraceStamps
from runtime.wire.plan import (
    AdapterAnswer,
    AdapterPiece,
    AdapterRef,
    BatchPlan,
    CallRank,
    DropAdapter,
    LoadAdapter,
    MasksAwaited,
    ProcessorCalls,
    RankAnswer,
    RankCall,
    SampleMasks,
    StepResult,
    TensorName,
    WeightsUpdate,
    WorkerCommand,
    WorkerFailed,
    WorkerReady,
)
from runtime.wire.retention import Retention
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import RingStatus

MAX_TEMPLATE_KWARGS_BYTES = 1 << 16
MAX_ROLE_CHARS = 64
MAX_FURTHER_BYTES = 1 << 20
MAX_TOOLS_BYTES = 1 << 20
FURTHER_FIELDS = frozenset({"tool_calls", "tool_call_id", "reasoning_content"})
Task: TypeAlias = Literal["generate", "embed"]
MAX_PROFILE_STEPS = 10_000
"""Maximum number of steps of a profile. A step is about ten events of 150 bytes."""

# -- what a client asks ------------------------------------------------------------------------------------


class Resume(Record, frozen=True):
    """Output of a sequence that the client already has and submits again after a process was restarted."""

    output_ids: PackedIds = b""
    num_chars: Count = 0
    """Number of characters of output text delivered. The detokenizer replays `output_ids` and sends text from
    this character on.
    """
    cumulative_logprob: float = 0.0
    num_prompt_logprobs: Count = 0


ChatRole: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_ROLE_CHARS)]


class ChatMessage(Record, frozen=True):
    role: ChatRole
    content: Text
    name: Label = ""
    further: Annotated[bytes, Meta(max_length=MAX_FURTHER_BYTES)] = b""
    """A msgpack map of FURTHER_FIELDS for the chat template, such as tool calls; empty for none."""


class GenerateRequest(Message, frozen=True):
    """A prompt, and `sampling.n` sequences to generate from it. Exactly one terminal message answers each."""

    handle: Handle
    """Handle of the first sequence; the others have the next indexes."""
    sampling: SamplingParams
    """Sampling parameters. Sequence i uses seed + i."""
    text: Text | None = None
    """Prompt as text. A request has exactly one of `text`, `input_ids` and `messages`."""
    input_ids: PackedIds | None = None
    """Prompt as packed token ids."""
    messages: Annotated[tuple[ChatMessage, ...], TURNS] | None = None
    """Prompt as a conversation for the model's chat template."""
    label: Label = ""
    """The caller's own id of the request. It is returned, and never used as a key."""
    stream: bool = False
    """False: one OutputBatch entry at the end. True: an entry whenever there is new output."""
    priority: Priority = 0
    cache_salt: Label = ""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True if the last chat message is the beginning of the answer."""
    template_kwargs: Annotated[bytes, Meta(max_length=MAX_TEMPLATE_KWARGS_BYTES)] = b""
    """A msgpack map with further variables of the chat template."""
    arrival_time: Annotated[float, Meta(ge=0.0)] = 0.0
    """Time at which the caller asked, in seconds since 1970, for statistics; 0: when it is received."""
    time_limit_ms: Count = 0
    """Milliseconds from its receipt after which the request ends with reason `timeout`; 0: never."""
    resume: Resume | None = None
    """Output delivered by an earlier attempt, only for a request of one sequence; None: a new request."""
    task: Task = "generate"
    """`generate`, or `embed`: return the prompt's vector instead of output. A server does one of them."""
    retention: Retention | None = None
    """Wish how firmly and how long the prompt's KV is kept; None: earlier ones for the same pages stay."""
    guide: Guide | None = None
    """Form that the output must have; None: any."""
    tenant: Label = ""
    """Tenant of the request (runtime.ring.tenants). The value is trusted from clients that can open the run
    directory. For a request over TCP it is set to the tenant of the key that was used.
    """
    tools: Annotated[bytes, Meta(max_length=MAX_TOOLS_BYTES)] = b""
    """A JSON list of tools that the chat template shows; empty for none."""
    draft_ids: PackedIds = b""
    """Guesses at the beginning of the output, packed, verified in one step; at most MAX_DRAFT_TOKENS."""
    prediction: Text = ""
    """Text that the output may resemble. Guesses are looked for in it first."""
    adapter: AdapterRef | None = None
    """LoRA adapter to use. The tokenizer sets its version, and its path if the launch has named it."""
    trace: TraceStamps | None = None
    """Trace of a sampled request; None: not sampled."""
    processors: ProcessorCalls = ()
    """Logits processors of the launch that are applied to its output."""
    prompt_table: AdapterRef | None = None
    """Prompt table with the vectors of virtual tokens. With a name, all its vectors come before the prompt.
    Otherwise the prompt's ids from the vocabulary's size on are rows of it.
    """
    extra_ids: Annotated[bytes, Meta(max_length=8 * MAX_PROMPT_TOKENS)] = b""
    """Packed uint64, one for each prompt id. Only requests with equal ones share prefixes."""


class AbortRequest(Message, frozen=True):
    """End these sequences, or all of a client. The abort of an unknown sequence is remembered for a while."""

    handles: Annotated[tuple[Handle, ...], Meta(max_length=MAX_ABORT_HANDLES)] = ()
    client: ClientId = 0
    tenant: Label = ""
    """Tenant that asks, as in GenerateRequest. Only its own sequences end; the owner may end all."""


QuestionOp: TypeAlias = Literal[
    "server_info", "flush_cache", "iteration_stats", "request_stats", "snapshot", "timeline"
]
CommandOp: TypeAlias = Literal[
    "pause_generation",
    "continue_generation",
    "start_profile",
    "stop_profile",
    "drop_adapter",
    "collective_rpc",
    "put_adapter",
    "update_weights",
]
ControlOp: TypeAlias = Literal[QuestionOp, CommandOp]
PauseMode: TypeAlias = Literal["in_place", "retract", "abort"]
CloseReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "stop_string", "error"]


class ControlRequest(Message, frozen=True):
    """Question or command to the ring itself. One ControlReply answers it, with its client and number."""

    client: ClientId
    number: Count
    op: ControlOp
    after: Count = 0
    """Number of the last iteration that the client has seen, for statistics. For timelines without a label:
    number of the last timeline.
    """
    wait: bool = False
    """True to answer only when there is something newer, for statistics."""
    own: Annotated[tuple[ClientId, ...], Meta(max_length=64)] = ()
    """All client ids of the asker, whose requests are named to it, for request_stats."""
    mode: PauseMode = "in_place"
    """Treatment of running requests, for pause_generation."""
    num_steps: Annotated[int, Meta(ge=0, le=MAX_PROFILE_STEPS)] = 0
    """Number of steps after which a profile ends by itself, for start_profile; 0: MAX_PROFILE_STEPS."""
    tenant: Label = ""
    """Tenant that asks, as in GenerateRequest. Only admins may."""
    label: Label = ""
    """Name of the adapter, for drop_adapter. For timeline: the request's label, or empty for all; answered by
    the asking client's detokenizer, about its own sequences.
    """
    call: RankCall | None = None
    """Method and arguments of a collective_rpc; None for other operations."""
    adapter: AdapterPiece | None = None
    """Piece of an adapter's weights for put_adapter; None for other operations."""
    weights: WeightsUpdate | None = None
    """Weights for update_weights; None for other operations. The launcher answers."""


# -- tokenizer → scheduler → detokenizer -------------------------------------------------------------------


class StreamOpen(Record, frozen=True):
    """Properties of a sequence for the detokenizer. The scheduler passes them on unread."""

    handle: Handle
    num_prompt_tokens: Count
    prompt_tail: PackedIds = b""
    """Last few prompt ids, which are the context for decoding the first output token."""
    label: Label = ""
    stream: bool = False
    stop: Annotated[tuple[ShortText, ...], Meta(max_length=64)] = ()
    stop_words: Annotated[tuple[bytes, ...], Meta(max_length=64)] = ()
    """Stop words, each as packed token ids. The sequence ends when its output ends with one."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: Count = 0
    resume: Resume | None = None
    content: Content = NO_CONTENT


class TokenizedRequest(Message, frozen=True):
    """A checked request in token ids."""

    handle: Handle
    input_ids: PackedIds
    sampling: SamplingParams
    """Sampling parameters, always with a seed: the client library draws one if the user gave none."""
    stream_open: Raw
    priority: Priority = 0
    namespace: Annotated[bytes, Meta(max_length=64)] = b""
    """Keyed digests of tenant, salt and adapter. Requests of different namespaces never share a page."""
    output_ids: PackedIds = b""
    """Packed output that an earlier attempt delivered. It counts as output, not as prompt."""
    num_prompt_logprobs: Count = 0
    """Number of prompt logprobs that an earlier attempt delivered."""
    arrived_s: float = 0.0
    """Time at which the caller asked, on CLOCK_MONOTONIC; 0.0: when it is received."""
    deadline_s: float = 0.0
    """Time at which it ends with reason `timeout`, on CLOCK_MONOTONIC; 0.0: never."""
    retention: Retention | None = None
    guide: Guide | None = None
    tenant: Label = ""
    is_again: bool = False
    """True if it was accepted before a restart and is submitted again. Queue limits do not refuse it."""
    draft_ids: PackedIds = b""
    prediction_ids: PackedIds = b""
    adapter: AdapterRef | None = None
    trace: TraceStamps | None = None
    processors: ProcessorCalls = ()
    label: Label = ""
    """Label of the request for its logits processors; empty without one."""
    more_opens: tuple[Raw, ...] = ()
    """StreamOpens of a beam search's other sequences, whose handles have the next indexes. Sequence i is the
    hypothesis of rank i, also when it is submitted again alone.
    """
    prompt_table: AdapterRef | None = None
    shows_hypotheses: bool = False
    """True for a beam search whose client wants to see hypotheses while it runs."""
    content: Content = NO_CONTENT


class StopMatched(Message, frozen=True):
    """A stop string was completed by output token number `num_tokens` of the sequence."""

    handle: Handle
    num_tokens: Count


class GiveWay(Message, frozen=True):
    """Let the engine end, because one with other weights takes its place. Only sent to a scheduler that has
    passed on a WeightsUpdate.
    """

    epoch: Count
    """Epoch of the engine that is meant. Another one stays."""
    aborts: bool = False
    """True to end all live requests first."""


class ErrorInfo(Record, frozen=True):
    message: ShortText
    code: Annotated[str, Meta(max_length=128)] = "internal_error"
    param: Annotated[str, Meta(max_length=256)] | None = None
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    retry_after_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Seconds after which to try again; 0: not stated."""


class DraftCounts(Record, frozen=True):
    """Counts of guesses at one sequence's tokens, since its last attempt began."""

    num_drafted: Count = 0
    """Number of guesses that the worker verified."""
    num_accepted: Count = 0
    """Number of accepted guesses, which is the number of output tokens less the steps that produced them."""
    num_accepted_prediction: Count = 0
    """Number of accepted guesses among those from the request's `prediction`."""
    num_rejected_prediction: Count = 0
    """Number of rejected guesses among those from the request's `prediction`."""

    @staticmethod
    def sum(several: Sequence[DraftCounts]) -> DraftCounts | None:
        """Add up the counts of several sequences; None for no sequences."""
        if not several:
            return None
        return DraftCounts(*map(sum, zip(*map(astuple, several), strict=True)))


class Closed(Record, frozen=True):
    """The scheduler has released a sequence; nothing follows for this handle."""

    handle: Handle
    reason: CloseReason
    stop_token: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    """Token id that ended it, for reason `stop`; -1: none."""
    cached_tokens: Count = 0
    error: ErrorInfo | None = None
    perf_metrics: RequestPerfMetrics | None = None
    drafts: DraftCounts | None = None
    """Counts of the sequence's guesses; None if it does not use speculation."""
    trace: TraceStamps | None = None
    beam: BeamScore | None = None
    """Score of a winning hypothesis of a beam search."""
    weight_version: Label = ""
    """Version of the weights that it ended with."""


class TokenLogprobs(Record, frozen=True):
    """Logprobs of some tokens of one sequence: of its new output tokens, or of its prompt."""

    handle: Handle
    logprobs: bytes
    """Logprobs [n] float32 of the tokens."""
    top_ids: bytes = b""
    """Ids [n, k] int32 of the k most likely tokens at each position, most likely first."""
    top_logprobs: bytes = b""
    """Logprobs [n, k] float32 of `top_ids`."""
    ranks: bytes = b""
    """Places [n] int32 of the tokens among all ids, 1 for the most likely; of a prompt alone."""


class TokenBatch(Message, frozen=True):
    """Output of one step for a detokenizer, read in this order: opened, prompt logprobs, tokens, closed."""

    step: Count
    handles: bytes = b""
    """Handles [n, 16] of the sequences of `tokens`. A sequence with several tokens is repeated."""
    tokens: bytes = b""
    """New token ids [n] int32."""
    opened: tuple[Raw, ...] = ()
    """StreamOpen of each sequence that the scheduler has accepted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    closed: tuple[Closed, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Next logprobs of prompts. The first one of a prompt belongs to its second token."""
    shown: tuple[HypothesisSoFar, ...] = ()
    epoch: Count = 0
    """Epoch of the sending engine. What arrives of an earlier engine after a later one's is dropped."""


class RequestFailed(Message, frozen=True):
    """A sequence was refused before it reached the scheduler."""

    handle: Handle
    error: ErrorInfo


class ControlReply(Message, frozen=True):
    client: ClientId
    number: Count
    body: Raw
    """JSON-like result of the operation; an ErrorInfo if `ok` is false."""
    ok: bool = True


# -- scheduler ↔ grammar -----------------------------------------------------------------------------------


class ForgetMatchers(Message, frozen=True):
    """A new scheduler has started: close all matchers that earlier ones have opened."""


class OpenMatcher(Message, frozen=True):
    """Open a matcher of a sequence, replacing an earlier one. Answered by MatcherState or GuideRefused."""

    handle: Handle
    guide: Guide
    output_ids: PackedIds = b""
    """Output that the sequence already has, as packed ids."""
    memory: Label = ""
    """Name of the shared memory for its masks (mask_memory); empty: masks come in the answers."""
    slot: Count = 0
    """First of its slots: the next mask goes there, and those behind guesses into the following ones."""
    num_slots: Count = 1
    tenant: Label = ""
    """Tenant of the sequence. Tenants take turns, and what one has compiled is compiled again for another."""
    content: Content = NO_CONTENT


class AdvanceMatchers(Message, frozen=True):
    """New tokens and guesses. Only the last entry of each sequence is answered, by a MatcherState."""

    entries: tuple[MatcherNews, ...]


class CloseMatcher(Message, frozen=True):
    """The sequence has ended, and its slots belong to another. A compilation for it alone may stop."""

    handle: Handle


class MatcherStates(Message, frozen=True):
    states: tuple[MatcherState, ...]


class GrammarStarted(Message, frozen=True):
    """A new grammar process without matchers has started: open all again."""


class GuideRefused(Message, frozen=True):
    """A guide cannot be kept, or not any longer."""

    handle: Handle
    error: ErrorInfo


# -- detokenizer ↔ client ----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection. It is decoded before anything else."""

    version: Count
    schema: Annotated[str, Meta(max_length=64)]
    wants_status: bool = False
    """True to get a RingStatus with each ping, for clients that cannot read the status page."""
    client: ClientId = 0
    """Id that an earlier connection of this client had and that it keeps; 0: draw a new one."""


class HelloAck(Message, frozen=True):
    client: ClientId
    """Id drawn by the detokenizer. Every handle of this connection starts with it."""
    epoch: Count
    version: Count
    schema: Annotated[str, Meta(max_length=64)]
    num_tokenizers: Annotated[int, Meta(ge=1, le=64)] = 1
    num_detokenizers: Annotated[int, Meta(ge=1, le=64)] = 1
    max_waiting: Count = 0
    """Maximum number of sequences that may wait in the ring. Further ones are refused."""


class Ping(Message, frozen=True):
    """Sent once a second in both directions. A peer that is silent for 15 s is given up."""

    client: ClientId = 0


class Usage(Record, frozen=True):
    """Numbers of tokens of a request or of one of its sequences."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    """Prompt tokens whose KV was found in the cache."""
    drafts: DraftCounts | None = None


class Finish(Record, frozen=True):
    """Terminal part of a sequence's last output."""

    reason: Literal["stop", "length", "abort", "timeout", "error"]
    usage: Usage
    matched: str | int | None = None
    """Stop string or stop token id that ended it; None if it was the model's own end token."""
    cumulative_logprob: float | None = None
    error: ErrorInfo | None = None
    perf_metrics: RequestPerfMetrics | None = None
    trace: TraceStamps | None = None
    score: float | None = None
    """Score of a hypothesis of a beam search."""
    weight_version: Label = ""


class SequenceOutput(Record, frozen=True):
    """New output of one sequence since the last message about it."""

    handle: Handle
    text: str = ""
    token_ids: bytes = b""
    logprobs: bytes = b""
    """Logprobs [n] float32 of token_ids, if asked for."""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    finish: Finish | None = None
    prompt_logprobs: bytes = b""
    """Next logprobs [m] float32 of the prompt, from its second token on, if asked for."""
    prompt_top_ids: bytes = b""
    """Ids [m, k] int32 of the most likely tokens at each position of prompt_logprobs."""
    prompt_top_logprobs: bytes = b""
    num_prompt_tokens: Count = 0
    """Length of the prompt in the first output of a stream; 0 in all others."""
    hypothesis: bytes = b""
    """All ids of a beam search's current hypothesis; replaces earlier ones. Empty: none is shown."""
    prompt_ranks: bytes = b""
    """Places [m] int32 of the tokens of prompt_logprobs among all ids, 1 for the most likely."""


class OutputBatch(Message, frozen=True):
    outputs: tuple[SequenceOutput, ...]


# -- large tensors -----------------------------------------------------------------------------------------


class TensorEntry(Record, frozen=True):
    """Description of some rows of one tensor of a sequence. They are sent in the order of the tensor."""

    handle: Handle
    name: TensorName
    dtype: Literal["float32"]
    shape: tuple[Count, Count]
    """Shape of these rows; see StepTensor.shape."""
    start: Count
    """Index of the first of these rows in the whole tensor."""


class TensorBatch(Message, frozen=True):
    """Description of the raw frames that follow in the same multipart message, one entry for each, in order.
    It is sent before the message that ends the sequence.
    """

    entries: Annotated[tuple[TensorEntry, ...], Meta(max_length=4096)]

    @property
    def num_frames(self) -> int:
        return len(self.entries)


# -- launcher ----------------------------------------------------------------------------------------------


class ProcessReady(Message, frozen=True):
    role: Label
    epoch: Count
    info: dict[str, int | float | str] = field(default_factory=dict)


class ProcessFailed(Message, frozen=True):
    role: Label
    message: Text
    exit_code: Count


ToTokenizer: TypeAlias = GenerateRequest | AbortRequest | ControlRequest
ToScheduler: TypeAlias = (
    TokenizedRequest | AbortRequest | StopMatched | ControlRequest | GuideRefused | GiveWay
)
ToGrammar: TypeAlias = ForgetMatchers | OpenMatcher | AdvanceMatchers | CloseMatcher | BranchMatchers
FromGrammar: TypeAlias = MatcherStates | GrammarStarted | BranchStates
ToDetokenizer: TypeAlias = TokenBatch | RequestFailed | ControlReply | TensorBatch | ControlRequest
FromClient: TypeAlias = Hello | Ping
ToClient: TypeAlias = HelloAck | OutputBatch | ControlReply | Ping | RingStatus | TensorBatch
ToRank: TypeAlias = BatchPlan | SampleMasks | LoadAdapter | DropAdapter | CallRank | WorkerCommand
FromRank: TypeAlias = StepResult | MasksAwaited | AdapterAnswer | RankAnswer | WorkerReady | WorkerFailed
ToLauncher: TypeAlias = ProcessReady | ProcessFailed | ControlRequest

UNIONS = {
    "tokenizer_in": ToTokenizer,
    "scheduler_in": ToScheduler,
    "grammar_in": ToGrammar,
    "grammar_out": FromGrammar,
    "detokenizer_in": ToDetokenizer,
    "client_out": ToClient,
    "client_in": FromClient,
    "rank_in": ToRank,
    "step_results": FromRank,
    "launcher_in": ToLauncher,
}
