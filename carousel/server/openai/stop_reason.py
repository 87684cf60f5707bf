"""How OpenAI's clients are told why a sequence has ended."""

from __future__ import annotations

from typing import TypeVar

from carousel.client.core.result import CompletionOutput, Delta

Reason = TypeVar("Reason", str, str | None)

TIME_LIMIT = "time_limit"


def finish_reason_of(part: Delta | CompletionOutput) -> str | None:
    """Return the finish reason that OpenAI's clients know. Strict ones know no "timeout": to them a limit of
    time is a limit of length.
    """
    return "length" if part.finish_reason == "timeout" else part.finish_reason


def reason_with_calls(reason: Reason, num_calls: int) -> Reason | str:
    """Return the reason as OpenAI gives it where the answer is calls of tools."""
    return "tool_calls" if reason == "stop" and num_calls else reason


def stop_reason_of(part: Delta | CompletionOutput) -> str | int | None:
    """vLLM's field: what stopped it."""
    return TIME_LIMIT if part.finish_reason == "timeout" else part.matched_stop
