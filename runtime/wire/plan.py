"""Messages between the scheduler and the model worker: rows, positions and pages, never a request.
`runtime.wire.messages` includes them in the unions of their sockets.
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
"""Name of a request's tensor: context_logits, generation_logits or embedding; for an additional output its
name with the prefix `context_` or `generation_`.
"""
OutputNames: TypeAlias = Annotated[tuple[Label, ...], Meta(max_length=16)]
NO_ADAPTER = -1
"""Adapter slot of a row that uses only the base model."""
MAX_PIECE_BYTES = 1 << 20
"""Maximum number of bytes of an adapter's weights in one message."""
MAX_WEIGHTS_PATH_CHARS = 4096
NO_UPDATES = "this server was started without --weights-dir"
NO_LORA = "this server serves no LoRA adapters: it was started without --enable-lora"

MAX_PROCESSORS = 8
MAX_ARGS_BYTES = 4096
"""Maximum number of bytes of JSON in the arguments of all of a request's logits processors."""
BATCHED = "batched"
"""Name of the logits processor that is called once a step, with all of its rows."""
PROCESSORS = "logits_processors"
"""Request field that names its logits processors."""
PROCESSED_SCORES = "processed_scores"
"""Name of the tensor of scores that logits processors make for a row of a beam search."""

MAX_CALL_BYTES = 1 << 20
"""Maximum number of bytes of JSON in the arguments of a call to ranks, and in a rank's result."""
MAX_CALL_S = 3600.0
MAX_RANKS = 1024
CallBytes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_CALL_BYTES)]

_decode_map = msgspec.json.Decoder(dict[str, Any]).decode


class ProcessorCall(Record, frozen=True):
    """A logits processor by the name that the launch gave it. Code never comes in a request."""

    name: Label
    args: Annotated[bytes, Meta(max_length=MAX_ARGS_BYTES)] = b""
    """Keyword arguments of the processor as a JSON object; empty for none."""

    def keywords(self) -> dict[str, Any]:
        return _decode_map(self.args) if self.args else {}


ProcessorCalls: TypeAlias = Annotated[tuple[ProcessorCall, ...], Meta(max_length=MAX_PROCESSORS)]


def check_calls(calls: Sequence[ProcessorCall]) -> None:
    """Check the logits processors of a request. Raises InvalidRequest, which names its field."""
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
    """Logits processors of a row, with ids of its request that only processors get."""

    request_id: Count
    """Number of the sequence in the order of arrival."""
    client_id: Label
    """Label of its request; empty for none."""
    calls: ProcessorCalls
    searches: bool = False
    """True for rows of a beam search. Its processors are called for all of them at once, with
    log-probabilities, and the resulting scores are returned.
    """


class ProcessedRow(Record, frozen=True):
    """A row whose logits processors are called in a step, and the tokens that they see: the first `start`
    tokens of the row `source`, and `ids`.
    """

    row: Count
    source: Count
    """Row whose tokens it continues; another row after a fork of a beam search."""
    start: Count
    ids: bytes
    """Tokens [n] int32 that the worker does not have yet."""
    beam: Count = 0
    """Index of its hypothesis in the beam search."""


class RowSetup(Record, frozen=True):
    """Settings of a row with a new holder, which the device keeps during the stay."""

    row: Count
    num_prompt: Count
    features: Annotated[int, Meta(ge=0, lt=1 << FEATURE_BITS)]
    """Bits of runtime.sampling.features that its sampling needs."""
    columns: Annotated[bytes, Meta(min_length=ROW_BYTES, max_length=ROW_BYTES)]
    """Sampling parameters of the row, packed as in runtime.sampling.columns."""
    stop_ids: bytes = b""
    """Ids [n] int32 that must not be sampled below the position in column `min_len`. Empty if min_tokens is
    0.
    """
    bias_ids: bytes = b""
    bias_values: bytes = b""
    """Bias [n] float32 of each id in `bias_ids`."""
    history_ids: bytes = b""
    """Prompt and output so far (the first `num_prompt` are the prompt). Only set if a feature needs them."""
    allowed_ids: bytes = b""
    """Ids [n] int32 that may be sampled. Empty: all."""
    bad_words: tuple[bytes, ...] = ()
    """Banned words as packed int32 ids. The last id of each must not follow the others."""
    top_p_reset_ids: bytes = b""
    """Ids [n] int32 after which the decay of top-p starts again."""
    adapter_slot: Annotated[int, Meta(ge=-1, lt=1 << 31)] = NO_ADAPTER
    """Slot of the row's adapter; NO_ADAPTER: none."""
    processing: RowProcessing | None = None
    """Logits processors of the row."""
    outputs: OutputNames = ()
    """Additional outputs that it wants."""
    prompt_slot: Annotated[int, Meta(ge=-1, lt=1 << 31)] = NO_ADAPTER
    """Slot of the prompt table that the prompt's ids from the vocabulary's size on refer to."""

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
        """Make the settings of a stay. tokens: prompt and output so far, packed. min_len: position below
        which no id of `stop_ids` is sampled.
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
        """Return the number of output tokens after the last one that resets the decay of top-p."""
        output = unpack_ids(tokens)[num_prompt:]
        resets = np.flatnonzero(np.isin(output, sampling.top_p_reset_ids))
        return len(output) - (resets.item(-1) + 1 if len(resets) else 0)


class PromptPositions(Record, frozen=True):
    """Positions of a prompt chunk whose logits are wanted, although nothing is sampled there."""

    index: Count
    """Index of its row in the plan's `rows`."""
    first: Count
    """Index of the first position within the row's chunk. The positions continue to the last token that is
    not a guess.
    """
    targets: bytes
    """Ids [n] int32 of the prompt token after each position, whose logprob is wanted; 0 for the prompt's last
    position, which has none.
    """
    num_logprobs: Annotated[int, Meta(ge=-1)] = -1
    """Number of most likely ids whose logprobs are returned with the target's; -1: no logprobs."""
    returns_logits: bool = False
    """True to return the raw logits of all these positions."""
    returns_outputs: bool = False
    """True to return the row's additional outputs at these positions."""


class BatchPlan(Message, frozen=True):
    """One forward step, by row: first the decodes, then the rest. The device applies changes to its tables in
    the order of the fields.

    A decode computes one token, samples one and verifies no guess, so `lens`, `samples` and `drafts` exist
    for the rest only. All packed arrays are int32.
    """

    step: Count
    setups: tuple[RowSetup, ...]
    page_copies: tuple[tuple[int, int], ...]
    table_spans: bytes
    """Changes of the page table, [num_spans, 3] (row, start, n): page_table[row, start:start + n] = the next
    n entries of table_pages.
    """
    table_pages: bytes
    num_decodes: Count
    rows: bytes
    """Rows [num_rows] of the step, decodes first."""
    starts: bytes
    """Position [num_rows] of each row's first new token, which is the length of its KV cache before the step.
    """
    input_ids: bytes
    """Input ids [num_decodes + sum(lens)]; -1 stands for FutureMap[row]."""
    lens: bytes = b""
    """Number of new tokens [num_rest] of each row that is not a decode."""
    samples: bytes = b""
    """Number of tokens to sample [num_rest] for each row that is not a decode: 1 for the last chunk of a
    prompt, else 0.
    """
    drafts: bytes = b""
    """Number of trailing input ids [num_rest] that are guesses to verify, for each row that is not a decode.
    In a row that samples they follow at least one known token.
    """
    prompt_positions: tuple[PromptPositions, ...] = ()
    defer_sampling: bool = False
    """True if masks or tokens from the host are still to come: run the forward, and sample when SampleMasks
    arrives.
    """
    profiled: bool = False
    """True to return the times of the step's parts."""


class SampleMasks(Message, frozen=True):
    """Masks that a plan with `defer_sampling` waits for, and tokens for logits processors."""

    step: Count
    masks: tuple[tuple[int, bytes | Count], ...]
    """Masks as (row, bitmask) of int32 words, where bit i of word j allows token 32 * j + i; or (row, number
    of the slot in `memory`). The further entries of a row with guesses are for the positions behind its first
    guess, its second, and so on. Positions beyond the last entry have no mask, and their tokens are not used.
    """
    processed: tuple[ProcessedRow, ...] = ()
    """Rows whose logits processors are called."""
    memory: Label = ""
    """Name of the shared memory of masks; see runtime.base.mask_memory."""


class MasksAwaited(Message, frozen=True):
    """The model is computed for a plan with `defer_sampling`, and the rank has nothing to do until
    SampleMasks arrives. Sent only if it has not arrived by then.
    """

    step: Count


class AdapterRef(Record, frozen=True):
    """Reference to one version of an adapter's files."""

    name: Label
    id: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    """Number that the caller gave the adapter; one id always means one path. With an empty name, the number
    of weights that came with a request.
    """
    version: Annotated[str, Meta(max_length=64)]
    """Digest of the files (runtime.checkpoint.adapters). Changed files are another version."""
    path: Annotated[str, Meta(max_length=4096)]
    """Directory with adapter_config.json and adapter_model.safetensors."""
    pinned: bool = False
    """True if the adapter keeps its slot once it has one: it is not evicted for others."""
    num_rows: Count = 0
    """Sum of the ranks of all modules of the adapter. Set by the tokenizer."""
    num_virtual: Count = 0
    """Number of vectors of a prompt table, which ids from the vocabulary's size on refer to; 0 for a LoRA
    adapter. Set by the tokenizer.
    """


class WeightsUpdate(Record, frozen=True):
    """Weights that a model is to have from now on."""

    path: Annotated[str, Meta(min_length=1, max_length=MAX_WEIGHTS_PATH_CHARS)]
    """Directory of a checkpoint below --weights-dir, relative to it or absolute."""
    version: Label = ""
    """Name of the weights in answers; empty: the name of the directory."""
    aborts: bool = False
    """True to end all live requests. Otherwise they continue with the new weights."""


class AdapterPiece(Record, frozen=True):
    """Part of an adapter's weights that a client sends to the run directory. The first part has
    the config.
    """

    kind: Literal["lora", "prompt"]
    task_id: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the adapter's config and weights."""
    size: Annotated[int, Meta(ge=1, lt=1 << 48)]
    """Number of bytes of all the adapter's weights."""
    config: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)] = b""
    offset: Annotated[int, Meta(ge=0, lt=1 << 48)] = 0
    data: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)] = b""
    """Bytes of the weights from the offset on. Empty: only ask whether the adapter is there."""
    folder: Annotated[str, Meta(max_length=64)] = ""
    """Directory, among those being received, into which a client on this machine has written the whole
    adapter.
    """
    num_rows: Count = 0
    """Sum of the ranks of all modules (AdapterRef.num_rows). Set by the tokenizer for the scheduler."""
    path: Annotated[str, Meta(max_length=4096)] = ""
    """Directory of the complete adapter. Set by the tokenizer for the scheduler."""


class LoadAdapter(Message, frozen=True):
    """Load an adapter into a slot, replacing the one there. Plans launched before still use the old one.
    Answered by AdapterLoaded or AdapterFailed.
    """

    slot: Count
    ref: AdapterRef
    number: Count = 0
    """Number of the load, repeated in its answers."""


class DropAdapter(Message, frozen=True):
    """Free the memory of a slot, which no later plan uses."""

    slot: Count


class AdapterLoaded(Message, frozen=True):
    """The slot may be used by plans launched from now on."""

    rank: Count
    slot: Count
    version: str
    num_bytes: Annotated[int, Meta(ge=0)]
    """Bytes of memory that the adapter takes on this rank's device."""
    load_s: Annotated[float, Meta(ge=0.0)]
    number: Count = 0


class AdapterFailed(Message, frozen=True):
    """The adapter cannot be loaded; its slot is empty."""

    rank: Count
    slot: Count
    version: str
    message: ShortText
    number: Count = 0


AdapterAnswer: TypeAlias = AdapterLoaded | AdapterFailed


class RankCall(Record, frozen=True):
    """A method that ranks are to run."""

    method: Label
    arguments: CallBytes
    """Arguments in JSON: a list of the positional ones and an object of the keyword ones."""
    timeout_s: Annotated[float, Meta(gt=0.0, le=MAX_CALL_S)]
    """Seconds within which all ranks must answer."""
    ranks: Annotated[tuple[Count, ...], Meta(max_length=MAX_RANKS)] = ()
    """Ranks that are called; empty: all."""


class CallRank(Message, frozen=True):
    """Call a method on this rank, between the plans before and after it. Answered by RankAnswer."""

    number: Count
    """Number of the call, repeated in its answers."""
    method: Label
    arguments: CallBytes


class RankAnswer(Message, frozen=True):
    """Result or error of a call on one rank."""

    rank: Count
    number: Count
    value: CallBytes = b""
    """Return value of the method, in JSON."""
    error: ShortText = ""
    """Type and text of the exception that the method raised; empty if it returned."""


class WorkerCommand(Message, frozen=True):
    op: Literal["shutdown"]


class ChunkLogprobs(Record, frozen=True):
    """Log-probabilities of one entry of the plan's `prompt_positions` that asked for them."""

    index: Count
    logprobs: bytes
    """Logprobs [n] float32 of the targets."""
    ranks: bytes
    """Places [n] int32 of the targets among all ids, 1 for the most likely."""
    top_ids: bytes = b""
    """Ids [n, k] int32 of the most likely tokens at each target's position, most likely first."""
    top_logprobs: bytes = b""
    """Logprobs [n, k] float32 of `top_ids`."""


SpanName: TypeAlias = Literal["forward", "sample", "copy"]


class StepSpan(Record, frozen=True):
    """Begin and end of some work of the worker, on CLOCK_MONOTONIC."""

    name: SpanName
    begin_ns: Annotated[int, Meta(ge=0)]
    end_ns: Annotated[int, Meta(ge=0)]


class StepTensor(Record, frozen=True):
    """Description of a float32 frame that follows its StepResult: raw logits, rows of an additional output,
    or an embedding.
    """

    index: Count
    """Index of its row in the plan's `rows`."""
    name: TensorName
    start: Count
    """Position in the sequence of the tensor's first row: that of an input token or, for generation logits,
    of the sampled token. 0 for an embedding.
    """
    shape: tuple[Count, Count]
    """Shape of the tensor: [positions, vocab_size]; for an embedding [1, hidden_size], for an additional
    output [positions, its width].
    """


class StepResult(Message, frozen=True):
    """Results of a step: one token for each decode, then those of the rest in the plan's order. A row with
    guesses has the accepted ones and one more token.
    """

    step: Count
    tokens: bytes
    """Sampled ids [num_decodes + sum(counts)] int32."""
    counts: bytes = b""
    """Number of tokens [num_rest] int32 of each row that is not a decode: 0 if none was sampled; at least 1
    for a row with guesses.
    """
    logprobs: bytes = b""
    """Logprobs [m] float32 of the tokens of rows that asked for logprobs, in order."""
    num_top: Count = 0
    top_ids: bytes = b""
    """Ids [m, num_top] int32 of the most likely tokens, most likely first. A row that asked for fewer uses
    the first ones.
    """
    top_logprobs: bytes = b""
    prompts: tuple[ChunkLogprobs, ...] = ()
    tensors: tuple[StepTensor, ...] = ()
    """Descriptions of the raw frames that follow, one for each."""
    spans: tuple[StepSpan, ...] = ()
    """Times of a plan that is `profiled`."""
    errors: tuple[tuple[Count, ShortText], ...] = ()
    """Failures as (index of a row in the plan's `rows`, reason why its token is invalid)."""

    @property
    def num_frames(self) -> int:
        return len(self.tensors)


class WorkerReady(Message, frozen=True):
    num_pages: Count
    """Number of KV cache pages that may be used, without the dummy page 0."""
    page_size: Count
    max_rows: Count
    max_len: Count
    vocab_size: Count
    device: Label = ""
    attention_window: Count = 0
    """Number of a sequence's last tokens that the widest layer sees, including the newest; 0: one sees all.
    """
    output_width: Count = 0
    """Number of values in a row of an additional output."""
    num_adapted_modules: Count = 0
    """Number of the checkpoint's linear layers that adapters may change; 0: no adapters are served."""
    adapter_rows: Count = 0
    """Number of adapter rows (one for each rank of each module) that --lora-device-percent leaves room for;
    0: not specified.
    """
    adapter_row_bytes: Count = 0
    """Maximum number of bytes that an adapter of rank 1 takes for one linear layer, over all ranks."""


class WorkerFailed(Message, frozen=True):
    message: Text
