"""The message vocabulary: everything that crosses a process border, one union per socket.

Bulk integers travel as packed little-endian bytes (`wire.pack_ids`): a 256-row step encodes in under a
microsecond. Every string, list and integer that an outsider can send is bounded here; a decoder refuses what
is out of bounds before it allocates. What a process only passes on is `msgspec.Raw`, so ownership is visible
in the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Raw, field
from msgspec.structs import astuple

from runtime.wire.format import (
    MAX_PROMPT_TOKENS,
    TURNS,
    ClientId,
    Count,
    Handle,
    Label,
    Message,
    PackedIds,
    Record,
    ShortText,
    Text,
)
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from runtime.wire.handle import MAX_ABORT_HANDLES
from runtime.wire.hypotheses import BeamScore, BranchMatchers, BranchStates, HypothesisSoFar
from runtime.wire.perf_metrics import RequestPerfMetrics, TraceStamps
from runtime.wire.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterPiece,
    AdapterRef,
    BatchPlan,
    CallRank,
    DropAdapter,
    LoadAdapter,
    ProcessorCalls,
    RankAnswer,
    RankCall,
    SampleMasks,
    StepResult,
    TensorName,
    WorkerCommand,
    WorkerFailed,
    WorkerReady,
)
from runtime.wire.retention import Retention
from runtime.wire.sampling_params import SamplingParams

MAX_TEMPLATE_KWARGS_BYTES = 1 << 16
MAX_ROLE_CHARS = 64
MAX_FURTHER_BYTES = 1 << 20
MAX_TOOLS_BYTES = 1 << 20
FURTHER_FIELDS = frozenset({"tool_calls", "tool_call_id", "reasoning_content"})
Task: TypeAlias = Literal["generate", "embed"]
MAX_PROFILE_STEPS = 10_000
"""Most steps of a profile. A step is about ten events of 150 bytes."""

# -- what a client asks ------------------------------------------------------------------------------------


class Resume(Record, frozen=True):
    """Part of a sequence that the client already has and submits again after a process was restarted."""

    output_ids: PackedIds = b""
    num_chars: Count = 0
    """Characters of output text delivered; the detokenizer
    replays `output_ids` and emits from this character on.
    """
    cumulative_logprob: float = 0.0
    num_prompt_logprobs: Count = 0


ChatRole: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_ROLE_CHARS)]


class ChatMessage(Record, frozen=True):
    role: ChatRole
    content: Text
    name: Label = ""
    further: Annotated[bytes, Meta(max_length=MAX_FURTHER_BYTES)] = b""
    """A msgpack map of FURTHER_FIELDS for the chat template, such as calls of tools; empty for none."""


class GenerateRequest(Message, frozen=True):
    """A prompt, and `sampling.n` sequences to generate from it. Exactly one terminal message answers each."""

    handle: Handle
    """Handle of the first sequence; the others have the next indexes."""
    sampling: SamplingParams
    """Sequence i draws with seed + i."""
    text: Text | None = None
    """Prompt as text. A request has its prompt in exactly one of three forms."""
    input_ids: PackedIds | None = None
    """Prompt as packed token ids."""
    messages: Annotated[tuple[ChatMessage, ...], TURNS] | None = None
    """Prompt as a conversation for the model's chat template."""
    label: Label = ""
    """The user's own id; echoed, never used to find anything."""
    stream: bool = False
    """False: one OutputBatch entry at the end. True: an entry whenever there is something new."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    cache_salt: Label = ""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last chat message is the beginning of the answer."""
    template_kwargs: Annotated[bytes, Meta(max_length=MAX_TEMPLATE_KWARGS_BYTES)] = b""
    """A msgpack map: further variables of the chat template."""
    arrival_time: Annotated[float, Meta(ge=0.0)] = 0.0
    """Moment at which the caller asked, in seconds since 1970, for statistics. 0: when it is received."""
    time_limit_ms: Count = 0
    """Milliseconds after which the request ends with reason `timeout`, from when it was received; 0: never.
    """
    resume: Resume | None = None
    """Output that an earlier attempt has delivered; only with one sequence. None: it begins."""
    task: Task = "generate"
    """`generate`, or `embed`: the vector of the prompt, and no output. A server does one or the other."""
    retention: Retention | None = None
    """Wish of how firmly the prompt's KV is kept. None: like any other, and what was said of it stays."""
    guide: Guide | None = None
    """Form that its output must have; None: any."""
    tenant: Label = ""
    """Whose request it is (runtime.ring.tenants). Believed of who can open the run directory; what comes over
    TCP gets the name of the key that it came with.
    """
    tools: Annotated[bytes, Meta(max_length=MAX_TOOLS_BYTES)] = b""
    """A JSON list of the tools that the chat template shows; empty for none."""
    draft_ids: PackedIds = b""
    """Guesses at the beginning of the output, which are verified in one step; at most MAX_DRAFT_TOKENS."""
    prediction: Text = ""
    """Text that the output may resemble: guesses are looked for in it first."""
    adapter: AdapterRef | None = None
    """LoRA adapter that it is computed with. Its version is the tokenizer's to say, and so is the path of an
    adapter that the launch names.
    """
    trace: TraceStamps | None = None
    """Trace of a sampled request. None: it is not sampled."""
    processors: ProcessorCalls = ()
    """Logits processors of the launch that its output is drawn with."""
    prompt_table: AdapterRef | None = None
    """Vectors of virtual tokens. With a name, they all stand in front of the prompt; else the prompt's ids
    from the vocabulary's size on are rows of it.
    """
    extra_ids: Annotated[bytes, Meta(max_length=8 * MAX_PROMPT_TOKENS)] = b""
    """Packed uint64, of the prompt's ids: only requests with equal ones share prefixes."""


class AbortRequest(Message, frozen=True):
    """End these sequences, or all sequences of a client. What is unknown leaves a short-lived tombstone."""

    handles: Annotated[tuple[Handle, ...], Meta(max_length=MAX_ABORT_HANDLES)] = ()
    client: ClientId = 0
    tenant: Label = ""
    """Tenant that asks, as in GenerateRequest; only its own sequences end, and the owner may end all."""


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
]
ControlOp: TypeAlias = Literal[QuestionOp, CommandOp]
PauseMode: TypeAlias = Literal["in_place", "retract", "abort"]
CloseReason: TypeAlias = Literal["stop", "length", "abort", "timeout", "stop_string", "error"]


class ControlRequest(Message, frozen=True):
    """Question or order to the ring itself. Answered by one ControlReply with the same client and number."""

    client: ClientId
    number: Count
    op: ControlOp
    after: Count = 0
    """For statistics: the number of the last iteration that the client has seen; for timelines without a
    label: that of the last timeline.
    """
    wait: bool = False
    """For statistics: answer when there is something newer."""
    own: Annotated[tuple[ClientId, ...], Meta(max_length=64)] = ()
    """For request_stats: all client numbers of the asker, whose requests are named to it."""
    mode: PauseMode = "in_place"
    """For pause_generation: what becomes of the requests that run."""
    num_steps: Annotated[int, Meta(ge=0, le=MAX_PROFILE_STEPS)] = 0
    """For start_profile: it ends by itself after so many steps; 0: after MAX_PROFILE_STEPS."""
    tenant: Label = ""
    """Tenant that asks, as in GenerateRequest; only an admin may."""
    label: Label = ""
    """For drop_adapter: the adapter's name. For timeline: the request's label, or none for all; the
    detokenizer whose client asks answers, with what it has seen.
    """
    call: RankCall | None = None
    """Method and arguments of a collective_rpc; None for other operations."""
    adapter: AdapterPiece | None = None
    """Piece of an adapter's weights, of a put_adapter; None for other operations."""


# -- tokenizer → scheduler → detokenizer -------------------------------------------------------------------


class StreamOpen(Record, frozen=True):
    """Facts about a sequence for the detokenizer. The scheduler carries them without reading them."""

    handle: Handle
    num_prompt_tokens: Count
    prompt_tail: PackedIds = b""
    """The last few prompt ids: the context in which the first output token is decoded."""
    label: Label = ""
    stream: bool = False
    stop: Annotated[tuple[ShortText, ...], Meta(max_length=64)] = ()
    stop_words: Annotated[tuple[bytes, ...], Meta(max_length=64)] = ()
    """Stop words, each as packed token ids: the sequence ends where they are the last of its output."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: Count = 0
    resume: Resume | None = None


class TokenizedRequest(Message, frozen=True):
    """A checked request in token ids."""

    handle: Handle
    input_ids: PackedIds
    sampling: SamplingParams
    """Sampling parameters with a seed: the client library draws one where the user gave none."""
    stream_open: Raw
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    namespace: Annotated[bytes, Meta(max_length=64)] = b""
    """Keyed digests of tenant, salt and adapter; requests of different namespaces never share a page."""
    output_ids: PackedIds = b""
    """Output that an earlier attempt already delivered: counted as output, never as prompt."""
    num_prompt_logprobs: Count = 0
    """Number of the prompt's logprobs that an earlier attempt delivered."""
    arrived_s: float = 0.0
    """Moment at which the caller asked, by CLOCK_MONOTONIC; 0.0: when it is received."""
    deadline_s: float = 0.0
    """Moment at which it ends with reason `timeout`, by CLOCK_MONOTONIC; 0.0: never."""
    retention: Retention | None = None
    guide: Guide | None = None
    tenant: Label = ""
    is_again: bool = False
    """True if it was let in before and is made again after a restart: limits of the queue do not refuse it.
    """
    draft_ids: PackedIds = b""
    prediction_ids: PackedIds = b""
    adapter: AdapterRef | None = None
    trace: TraceStamps | None = None
    processors: ProcessorCalls = ()
    label: Label = ""
    """Label of the request, for its logits processors; empty where it has none."""
    more_opens: tuple[Raw, ...] = ()
    """StreamOpens of a beam search's other sequences: their handles have the next indexes. Sequence i of a
    request is the hypothesis of rank i, also where it is made again alone.
    """
    prompt_table: AdapterRef | None = None
    shows_hypotheses: bool = False
    """True for a beam search whose client looks on."""


class StopMatched(Message, frozen=True):
    """A stop string was completed by the sequence's `num_tokens`-th output token."""

    handle: Handle
    num_tokens: Count


class ErrorInfo(Record, frozen=True):
    message: ShortText
    code: Annotated[str, Meta(max_length=128)] = "internal_error"
    param: Annotated[str, Meta(max_length=256)] | None = None
    status: Annotated[int, Meta(ge=400, le=599)] = 500
    retry_after_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Seconds after which it is worth another try; 0.0: not said."""


class DraftCounts(Record, frozen=True):
    """Guesses at the tokens of one sequence, since its last attempt began."""

    num_drafted: Count = 0
    """Guesses that the worker verified."""
    num_accepted: Count = 0
    """Guesses that were right: tokens of output less the steps that gave some."""
    num_accepted_prediction: Count = 0
    """Number of right guesses among those that the request's `prediction` gave."""
    num_rejected_prediction: Count = 0
    """Number of wrong guesses among those that the request's `prediction` gave."""

    @staticmethod
    def sum(several: Sequence[DraftCounts]) -> DraftCounts | None:
        """Add up the counts of several sequences; None where there are none."""
        if not several:
            return None
        return DraftCounts(*map(sum, zip(*map(astuple, several), strict=True)))


class Closed(Record, frozen=True):
    """The scheduler has let go of a sequence; nothing follows for this handle."""

    handle: Handle
    reason: CloseReason
    stop_token: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    """The id that stopped it, for reason `stop`."""
    cached_tokens: Count = 0
    error: ErrorInfo | None = None
    perf_metrics: RequestPerfMetrics | None = None
    drafts: DraftCounts | None = None
    """Counts of the sequence's guesses. None: it guessed nothing, and was not to."""
    trace: TraceStamps | None = None
    beam: BeamScore | None = None
    """Score of a hypothesis that has won."""


class TokenLogprobs(Record, frozen=True):
    """Logprobs of some tokens of one sequence: of those that this step gave it, or of its prompt."""

    handle: Handle
    logprobs: bytes
    """Logprobs [n] float32 of the tokens themselves."""
    top_ids: bytes = b""
    """Ids [n, k] int32 of the k most likely tokens in the place of each, most likely first."""
    top_logprobs: bytes = b""
    """Logprobs [n, k] float32 of `top_ids`."""


class TokenBatch(Message, frozen=True):
    """News of one step for the detokenizer, read in the order: opened, prompt logprobs, tokens, closed."""

    step: Count
    handles: bytes = b""
    """Handles [n, 16] of the sequences of `tokens`; one with several tokens stands several times."""
    tokens: bytes = b""
    """New token ids [n] int32."""
    opened: tuple[Raw, ...] = ()
    """StreamOpen of each sequence that the scheduler took in."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    closed: tuple[Closed, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Next logprobs of prompts; the first of all belongs to a prompt's second token."""
    shown: tuple[HypothesisSoFar, ...] = ()
    epoch: Count = 0
    """Epoch of the engine that speaks: what an earlier one said after a later one has spoken is dropped."""


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


# -- scheduler ↔ grammar -----------------------------------------------------------------------------------


class ForgetMatchers(Message, frozen=True):
    """News of a new scheduler: matchers that earlier ones have opened are closed."""


class OpenMatcher(Message, frozen=True):
    """Compile a guide, unless that was done before, and match the output of a sequence with it; in the place
    of a matcher that it has. Answered by a MatcherState or a GuideRefused.
    """

    handle: Handle
    guide: Guide
    output_ids: PackedIds = b""
    """Output of the sequence that there is already, as packed ids."""
    memory: Label = ""
    """Where its masks are to be written (mask_memory); empty: they come in the answers."""
    slot: Count = 0
    """The first of its slots: its next mask goes there, and those behind guesses into the others."""
    num_slots: Count = 1


class AdvanceMatchers(Message, frozen=True):
    """New tokens of some sequences, and guesses. The last entry of each is answered by a MatcherState."""

    entries: tuple[MatcherNews, ...]


class CloseMatcher(Message, frozen=True):
    """The sequence has ended, and its slots are another's; who compiles for it alone may stop."""

    handle: Handle


class MatcherStates(Message, frozen=True):
    states: tuple[MatcherState, ...]


class GrammarStarted(Message, frozen=True):
    """News of a grammar process that has no matchers yet: open all again."""


class GuideRefused(Message, frozen=True):
    """Refusal of a guide that cannot be kept, or no longer."""

    handle: Handle
    error: ErrorInfo


# -- detokenizer ↔ client ----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection, before anything else is decoded."""

    version: Count
    schema: Annotated[str, Meta(max_length=64)]
    wants_status: bool = False
    """Send a RingStatus with each ping: this client cannot read the status page."""
    client: ClientId = 0
    """The id that an earlier connection of this client had, which it keeps; 0: draw one."""


class HelloAck(Message, frozen=True):
    client: ClientId
    """Drawn by the server; every handle of this connection starts with it."""
    epoch: Count
    version: Count
    schema: Annotated[str, Meta(max_length=64)]
    num_tokenizers: Annotated[int, Meta(ge=1, le=64)] = 1
    num_detokenizers: Annotated[int, Meta(ge=1, le=64)] = 1
    max_waiting: Count = 0
    """Sequences that may wait in the ring; more are refused."""


class Ping(Message, frozen=True):
    """Sent each second both ways; a peer that is silent for 15 s is gone."""

    client: ClientId = 0


class Usage(Record, frozen=True):
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    drafts: DraftCounts | None = None


class Finish(Record, frozen=True):
    """The terminal part of a sequence's last output."""

    reason: Literal["stop", "length", "abort", "timeout", "error"]
    usage: Usage
    matched: str | int | None = None
    """The stop string or stop token id, None when the model ended by its own end token."""
    cumulative_logprob: float | None = None
    error: ErrorInfo | None = None
    perf_metrics: RequestPerfMetrics | None = None
    trace: TraceStamps | None = None
    score: float | None = None
    """Score of a hypothesis of a beam search."""


class SequenceOutput(Record, frozen=True):
    """News of one sequence since its last output."""

    handle: Handle
    text: str = ""
    token_ids: bytes = b""
    logprobs: bytes = b""
    """Logprobs [n] float32 of token_ids, when asked for."""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    finish: Finish | None = None
    prompt_logprobs: bytes = b""
    """Next logprobs [m] float32 of the prompt, from its second token on, when asked for."""
    prompt_top_ids: bytes = b""
    """Ids [m, k] int32 of the most likely tokens in the place of each token of prompt_logprobs."""
    prompt_top_logprobs: bytes = b""
    num_prompt_tokens: Count = 0
    """Length of the prompt, with the first output of a stream; 0 with all others."""
    hypothesis: bytes = b""
    """All ids of what a beam search has so far; the newest counts alone. Empty: nothing is shown."""


class OutputBatch(Message, frozen=True):
    outputs: tuple[SequenceOutput, ...]


class ProcessState(Record, frozen=True):
    epoch: Count = 0
    """Epoch that the process was started under, which grows with each restart; 0: nothing is known of it."""
    is_ready: bool = True


Processes: TypeAlias = Annotated[tuple[ProcessState, ...], Meta(max_length=64)]


class RingStatus(Message, frozen=True):
    """The status page for clients that cannot read the file: who has been restarted, and the load."""

    state: Annotated[str, Meta(max_length=32)]
    num_running: Count
    num_waiting: Count
    num_free_pages: Count
    engine: ProcessState = ProcessState()
    tokenizers: Processes = ()
    detokenizers: Processes = ()


# -- large tensors -----------------------------------------------------------------------------------------


class TensorEntry(Record, frozen=True):
    """Description of some rows of one tensor of a sequence, which come in the tensor's order."""

    handle: Handle
    name: TensorName
    dtype: Literal["float32"]
    shape: tuple[Count, Count]
    """Shape of these rows, as StepTensor.shape."""
    start: Count
    """Row of the whole tensor that the first of these is."""


class TensorBatch(Message, frozen=True):
    """Description of the raw frames that follow in the same multipart message, one per entry, in order. It
    comes before whatever ends the sequence.
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
ToScheduler: TypeAlias = TokenizedRequest | AbortRequest | StopMatched | ControlRequest | GuideRefused
ToGrammar: TypeAlias = ForgetMatchers | OpenMatcher | AdvanceMatchers | CloseMatcher | BranchMatchers
FromGrammar: TypeAlias = MatcherStates | GrammarStarted | BranchStates
ToDetokenizer: TypeAlias = TokenBatch | RequestFailed | ControlReply | TensorBatch | ControlRequest
FromClient: TypeAlias = Hello | Ping
ToClient: TypeAlias = HelloAck | OutputBatch | ControlReply | Ping | RingStatus | TensorBatch
ToRank: TypeAlias = BatchPlan | SampleMasks | LoadAdapter | DropAdapter | CallRank | WorkerCommand
FromRank: TypeAlias = StepResult | AdapterLoaded | AdapterFailed | RankAnswer | WorkerReady | WorkerFailed
ToLauncher: TypeAlias = ProcessReady | ProcessFailed

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
