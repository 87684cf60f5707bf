"""The vocabulary between the scheduler and the model worker: rows, positions and pages, never a request.

Part of the wire like `runtime.wire.messages`, which puts these into the unions of their sockets.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from runtime.wire.format import Count, Label, Message, Record, Text


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
    history_ids: bytes = b""
    """Prompt and output so far (prompt first, `num_prompt` of them), only when something below or a penalty
    looks at them.
    """
    allowed_ids: bytes = b""
    """[n] int32: nothing else is sampled. Empty: everything may be."""
    bad_words: tuple[bytes, ...] = ()
    """Each packed int32 ids: the last one is forbidden where the others are the end of the context."""
    no_repeat_ngram: Count = 0
    """Size of the n-grams that may not come twice in prompt and output; 0: off."""
    top_p_decay: float = 1.0
    """Factor of top_p with each output token, down to `top_p_min`; back to `top_p` after a reset id."""
    top_p_min: float = 0.0
    top_p_age: Count = 0
    """Output tokens since the beginning or the last reset id."""
    top_p_reset_ids: bytes = b""
    """[n] int32."""
    returns_logits: bool = False
    """Each sampled position's raw logits go back to the host."""


class PromptPositions(Record, frozen=True):
    """Positions of a chunk of prompt whose logits are looked at, although nothing is sampled there."""

    index: Count
    """Place of its row in the plan's `rows`."""
    first: Count
    """Place of the first of them in the row's chunk; they go on to the chunk's last token."""
    targets: bytes
    """[n] int32: the prompt's next token at each, whose logprob is asked for. Of the prompt's last position,
    which has none, 0.
    """
    num_logprobs: Annotated[int, Meta(ge=-1)] = -1
    """-1: none; k: the target's and the k most likely ones'."""
    returns_logits: bool = False
    """All of the raw logits."""


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
    prompt_positions: tuple[PromptPositions, ...] = ()
    defer_sampling: bool = False
    """Masks made by the host are still to come: run the forward, sample when SampleMasks arrives."""
    profiled: bool = False
    """The result is to say what took how long."""


class SampleMasks(Message, frozen=True):
    """The masks that a plan with `defer_sampling` waits for."""

    step: Count
    masks: tuple[tuple[int, bytes], ...]
    """(row, bitmask): int32 words, bit i of word j allows token 32 * j + i."""


class WorkerCommand(Message, frozen=True):
    op: Literal["shutdown"]


class PromptLogprobs(Record, frozen=True):
    """Of one entry of the plan's `prompt_positions` that asked for logprobs."""

    index: Count
    logprobs: bytes
    """[n] float32, of the targets."""
    top_ids: bytes = b""
    """[n, k] int32, most likely first."""
    top_logprobs: bytes = b""
    """[n, k] float32."""


SpanName: TypeAlias = Literal["forward", "sample", "copy"]


class StepSpan(Record, frozen=True):
    """What the worker did from when to when, in CLOCK_MONOTONIC."""

    name: SpanName
    begin_ns: Annotated[int, Meta(ge=0)]
    end_ns: Annotated[int, Meta(ge=0)]


class StepTensor(Record, frozen=True):
    """Describes one frame of float32, raw logits or an embedding, that travels behind its StepResult."""

    index: Count
    """Place of its row in the plan's `rows`."""
    name: Literal["context_logits", "generation_logits", "embedding"]
    start: Count
    """Position in the sequence: of the first input token, or of the sampled token. 0 for an embedding."""
    shape: tuple[Count, Count]
    """[positions, vocab_size]; of an embedding [1, hidden_size]."""


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
    prompts: tuple[PromptLogprobs, ...] = ()
    tensors: tuple[StepTensor, ...] = ()
    """One for each frame behind it."""
    spans: tuple[StepSpan, ...] = ()
    """Of a plan that is `profiled`."""

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
    """Tokens that the layer which looks back the farthest sees, the newest included; 0: one sees all."""


class WorkerFailed(Message, frozen=True):
    message: Text
