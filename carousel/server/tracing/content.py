"""Prompts and outputs as attributes of a trace, in the form of OpenTelemetry's conventions for generative
models. They are made only if the launch asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from carousel.client.core.request.submission import Submission
from carousel.server.tracing.tracing import EndedSequence

MAX_CHARS = 16_384
"""Maximum number of characters of all texts of an attribute. With all spans that may wait, these are some
megabytes.
"""
MAX_MESSAGES = 64


def input_messages(submissions: Sequence[Submission]) -> str:
    """Return the prompts of a request as JSON; empty if they are token ids only."""
    messages: list[tuple[str, str]] = []
    for submission in submissions[:MAX_MESSAGES]:
        prompt = submission.prompt
        if isinstance(prompt, str):
            messages.append(("user", prompt))
        else:
            turns = [turn for turn in prompt[-MAX_MESSAGES:] if isinstance(turn, Mapping)]
            messages += [(str(turn.get("role", "")), _text(turn)) for turn in turns]
    return msgspec.json.encode(_bounded(messages)).decode() if messages else ""


def output_messages(sequences: Sequence[EndedSequence]) -> str:
    """Return the outputs of a request as JSON."""
    messages = _bounded([("assistant", each.text) for each in sequences[:MAX_MESSAGES]])
    reasons = [{"finish_reason": each.finish.reason} for each in sequences]
    return msgspec.json.encode([m | r for m, r in zip(messages, reasons, strict=False)]).decode()


def _bounded(messages: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the last of these messages, (role, text) each. The first ones are cut if not all fit."""
    made, room = list[dict[str, Any]](), MAX_CHARS
    for role, text in reversed(messages[-MAX_MESSAGES:]):
        made.append({"role": role, "parts": [{"type": "text", "content": text[:room]}]})
        room -= len(text[:room])
    return made[::-1]


def _text(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
