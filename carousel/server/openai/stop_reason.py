"""Finish and stop reasons in the words of OpenAI and vLLM."""

from __future__ import annotations

from typing import TypeVar

from carousel.client.core.result import CompletionOutput, Delta

Reason = TypeVar("Reason", str, str | None)

TIME_LIMIT = "time_limit"


def finish_reason_of(part: Delta | CompletionOutput) -> str | None:
    """Return the finish reason as OpenAI's clients know it. Strict clients do not know "timeout", so a time
    limit is reported as a length limit.
    """
    return "length" if part.finish_reason == "timeout" else part.finish_reason


def reason_with_calls(reason: Reason, num_calls: int) -> Reason | str:
    """Return the finish reason as OpenAI gives it if the answer has tool calls."""
    return "tool_calls" if reason == "stop" and num_calls else reason


def stop_reason_of(part: Delta | CompletionOutput) -> str | int | None:
    """Return vLLM's field: the cause of the stop."""
    return TIME_LIMIT if part.finish_reason == "timeout" else part.matched_stop
