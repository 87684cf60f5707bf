"""Bodies of the OpenAI API's answers (completions, chat, models), and the chunks of their streams."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from carousel.client.core.result import CompletionOutput
from runtime.sampling.additional_outputs import HIDDEN_STATES


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int | UnsetType = UNSET
    """Number of reasoning tokens, if the server separates reasoning."""
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Number of accepted guesses from the request's prediction, if the server speculates."""
    rejected_prediction_tokens: int | UnsetType = UNSET


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Counts within completion_tokens, if the server separates reasoning or speculates."""


class PromptLogprob(Struct, gc=False):
    logprob: float
    rank: int
    """Rank of the token in the vocabulary; 1 is the most likely."""
    decoded_token: str


PromptLogprobsJson: TypeAlias = list[dict[str, PromptLogprob] | None]
"""Log-probabilities for each prompt token, keyed by token id; null for the first token."""


class CompletionLogprobs(Struct):
    """Log-probabilities of an answer as columns with one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | None
    stop_reason: str | int | None
    """Same as matched_stop, or `time_limit` if the time limit ended the sequence."""
    prompt_logprobs: PromptLogprobsJson | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    score: float | UnsetType = UNSET
    """Score of a beam search's hypothesis. Not in OpenAI's API."""
    cumulative_logprob: float | UnsetType = UNSET
    """Sum of the logprobs of a beam search's hypothesis. Not in OpenAI's API."""
    hidden_states: list[float] | UnsetType = UNSET
    """Hidden states from which the last token was drawn, with return_hidden_states; empty if they belong to
    the prompt.
    """


class CompletionResponse(Struct):
    """Answer, or event of a stream. An event has `usage` only if it was requested."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET


class TopLogprob(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    name: str
    arguments: str
    """Arguments as JSON text."""


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessageBody(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET
    """Reasoning, if the server separates it."""
    reasoning: str | UnsetType | None = UNSET
    """Reasoning under vLLM's newer name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    score: float | UnsetType = UNSET
    """Score of a beam search's hypothesis. Not in OpenAI's API."""
    cumulative_logprob: float | UnsetType = UNSET
    """Sum of the logprobs of a beam search's hypothesis. Not in OpenAI's API."""
    hidden_states: list[float] | UnsetType = UNSET
    """Hidden states from which the last token was drawn, with return_hidden_states; empty if they belong to
    the prompt.
    """


class ChatResponse(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobsJson | None = None
    prompt_token_ids: list[int] | None = None


class FunctionCallDelta(Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    """Part of a tool call. The first part of a call has its id and name, later ones more of its arguments."""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: str | None = None


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | None = None


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    root: str
    """First of the model's names, or the adapter's name. Paths of files are not shown."""
    object: Literal["model"] = "model"
    owned_by: str = "carousel"
    parent: str | None = None
    """Name of an adapter's base model."""


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


def last_hidden_states(output: CompletionOutput) -> list[float]:
    """Return the hidden states from which the last token was drawn; empty if they belong to the prompt."""
    rows = output.additional_generation_outputs.get(HIDDEN_STATES)
    return [] if rows is None or not len(rows) else [float(number) for number in rows[-1]]
