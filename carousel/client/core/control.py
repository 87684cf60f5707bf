"""Arguments of control calls, which callers may make to a running ring besides requests, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, get_args

from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_LABEL_CHARS
from runtime.wire.messages import MAX_PROFILE_STEPS, PauseMode

F = TypeVar("F", bound=Callable[..., Any])


class ControlArguments(TypedDict, total=False):
    """The fields of ControlRequest that an operation may have."""

    mode: PauseMode
    num_steps: int
    label: str
    after: int


def check_mode(mode: PauseMode) -> PauseMode:
    """Raises InvalidRequest."""
    if mode not in get_args(PauseMode):
        raise InvalidRequest(f"mode: one of {', '.join(get_args(PauseMode))}, got {mode!r}", param="mode")
    return mode


def check_num_steps(num_steps: int | None) -> int:
    """Return the number as ControlRequest has it, where 0 stands for None. Raises InvalidRequest."""
    if num_steps is None:
        return 0
    if type(num_steps) is not int or not 1 <= num_steps <= MAX_PROFILE_STEPS:
        raise InvalidRequest(f"num_steps: 1 to {MAX_PROFILE_STEPS}, got {num_steps!r}", param="num_steps")
    return num_steps


def check_label(label: str) -> str:
    """Raises InvalidRequest."""
    if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL_CHARS:
        raise InvalidRequest(f"label: text of 1 to {MAX_LABEL_CHARS} characters", param="label")
    return label


def documented_as(other: Callable[..., Any]) -> Callable[[F], F]:
    """Give a call the words of another one, which does the same for who waits otherwise."""

    def document(call: F) -> F:
        call.__doc__ = other.__doc__
        return call

    return document
