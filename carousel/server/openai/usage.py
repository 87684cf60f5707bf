"""UsageCount: what an answer over several prompts and sequences has used. Each prompt counts once."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from carousel.client.core.result import Completion, Delta
from carousel.server.openai.responses import CompletionTokensDetails, PromptTokensDetails, UsageBody


class UsageCount:
    __slots__ = ("_cached", "_completion", "_prompt", "reasoning")

    def __init__(self, num_prompts: int) -> None:
        self._prompt = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._completion: dict[tuple[int, int], int] = {}
        """By (prompt, sequence)."""
        self.reasoning: dict[int, int] | None = None
        """Tokens of reasoning by the sequence, of a single prompt; None where it is not told apart."""

    def expect_prompts(self, num_tokens: Sequence[int]) -> None:
        """Lengths of the prompts, for counts before the first sequence has ended."""
        self._prompt = list(num_tokens)

    def add(self, prompt: int, delta: Delta) -> None:
        sequence = prompt, delta.index
        if delta.usage is None:
            self._completion[sequence] = self._completion.get(sequence, 0) + len(delta.token_ids)
            return
        self._completion[sequence] = delta.usage.completion_tokens
        self._prompt[prompt] = delta.usage.prompt_tokens
        if delta.index == 0:
            self._cached[prompt] = delta.usage.cached_tokens

    def body(self) -> UsageBody:
        reasoning = None if self.reasoning is None else sum(self.reasoning.values())
        return usage_body(sum(self._prompt), sum(self._completion.values()), sum(self._cached), reasoning)


def usage_of(completions: Sequence[Completion], reasoning: int | None = None) -> UsageBody:
    """`reasoning`: tokens of it, where it is told apart."""
    usages = [completion.usage for completion in completions]
    return usage_body(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        reasoning,
    )


def usage_body(prompt: int, completion: int, cached: int, reasoning: int | None = None) -> UsageBody:
    details = UNSET if reasoning is None else CompletionTokensDetails(reasoning)
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)
