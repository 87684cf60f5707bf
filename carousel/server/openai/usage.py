"""UsageCount: the usage of an answer over several prompts and sequences. Each prompt counts once."""

from __future__ import annotations

from collections.abc import Sequence

from carousel.client.core.result import Completion, Delta
from carousel.server.openai.response_types import CompletionTokensDetails, PromptTokensDetails, UsageBody
from runtime.wire.messages import DraftCounts


class UsageCount:
    __slots__ = ("_cached", "_completion", "_drafts", "_prompt", "reasoning")

    def __init__(self, num_prompts: int) -> None:
        self._prompt = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._completion: dict[tuple[int, int], int] = {}
        """Number of output tokens by (prompt, sequence)."""
        self.reasoning: dict[int, int] | None = None
        """Number of reasoning tokens by sequence, of a single prompt; None if reasoning is not separated."""
        self._drafts: list[DraftCounts] = []

    def expect_prompts(self, num_tokens: Sequence[int]) -> None:
        """Set the lengths of the prompts, for counts before the first sequence has ended."""
        self._prompt = list(num_tokens)

    def add_prompt(self, prompt: int, delta: Delta) -> None:
        """Take the length of a prompt from a delta that has it. Nothing else is counted."""
        if delta.num_prompt_tokens:
            self._prompt[prompt] = delta.num_prompt_tokens

    def add(self, prompt: int, delta: Delta) -> None:
        sequence = prompt, delta.index
        self.add_prompt(prompt, delta)
        if delta.usage is None:
            self._completion[sequence] = self._completion.get(sequence, 0) + len(delta.token_ids)
            return
        self._completion[sequence] = delta.usage.completion_tokens
        self._prompt[prompt] = delta.usage.prompt_tokens
        if delta.usage.drafts is not None:
            self._drafts.append(delta.usage.drafts)
        if delta.index == 0:
            self._cached[prompt] = delta.usage.cached_tokens

    def body(self) -> UsageBody:
        completion = sum(self._completion.values())
        reasoning = None if self.reasoning is None else sum(self.reasoning.values())
        return usage_body(sum(self._prompt), completion, sum(self._cached), reasoning, self._drafts)


def usage_of(completions: Sequence[Completion], reasoning: int | None = None) -> UsageBody:
    """Return the usage of whole answers. `reasoning` is the number of reasoning tokens, if reasoning is
    separated.
    """
    usages = [completion.usage for completion in completions]
    return usage_body(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        reasoning,
        [usage.drafts for usage in usages if usage.drafts is not None],
    )


def usage_body(
    prompt: int,
    completion: int,
    cached: int,
    reasoning: int | None = None,
    drafts: Sequence[DraftCounts] = (),
) -> UsageBody:
    """Return the body's usage. `reasoning` is the number of reasoning tokens; None if reasoning is not
    separated. `drafts` are the counts of sequences that guessed.
    """
    body = UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))
    total = DraftCounts.sum(drafts)
    if reasoning is not None or total is not None:
        details = body.completion_tokens_details = CompletionTokensDetails()
        if reasoning is not None:
            details.reasoning_tokens = reasoning
        if total is not None:
            details.accepted_prediction_tokens = total.num_accepted_prediction
            details.rejected_prediction_tokens = total.num_rejected_prediction
    return body
