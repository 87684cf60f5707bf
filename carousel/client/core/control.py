"""Checked arguments of control calls, which callers may make to a running ring besides requests, and the
results of their replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args

import msgspec

from carousel.client.core.mailbox import Item
from carousel.client.core.result import error_from_info
from runtime.base.errors import CarouselError, InvalidRequest
from runtime.wire.format import MAX_LABEL_CHARS
from runtime.wire.messages import MAX_PROFILE_STEPS, ControlReply, ErrorInfo, PauseMode
from runtime.wire.plan import (
    MAX_CALL_BYTES,
    MAX_CALL_S,
    MAX_RANKS,
    MAX_WEIGHTS_PATH_CHARS,
    AdapterPiece,
    RankCall,
    WeightsUpdate,
)

F = TypeVar("F", bound=Callable[..., Any])


class ControlArguments(TypedDict, total=False):
    """Fields of ControlRequest that an operation may have."""

    mode: PauseMode
    num_steps: int
    label: str
    after: int
    call: RankCall
    adapter: AdapterPiece
    weights: WeightsUpdate


def check_mode(mode: PauseMode) -> PauseMode:
    """Check the mode of a pause. Raises InvalidRequest."""
    if mode not in get_args(PauseMode):
        raise InvalidRequest(f"mode: one of {', '.join(get_args(PauseMode))}, got {mode!r}", param="mode")
    return mode


def check_num_steps(num_steps: int | None) -> int:
    """Return the number of a profile's steps in ControlRequest's form, where 0 stands for None. Raises
    InvalidRequest.
    """
    if num_steps is None:
        return 0
    if type(num_steps) is not int or not 1 <= num_steps <= MAX_PROFILE_STEPS:
        raise InvalidRequest(f"num_steps: 1 to {MAX_PROFILE_STEPS}, got {num_steps!r}", param="num_steps")
    return num_steps


def check_label(label: str) -> str:
    """Check a request's label. Raises InvalidRequest."""
    if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL_CHARS:
        raise InvalidRequest(f"label: text of 1 to {MAX_LABEL_CHARS} characters", param="label")
    return label


def check_call(
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    timeout_s: float,
    ranks: Sequence[int] | None,
) -> RankCall:
    """Check a call to ranks. Raises InvalidRequest, which names the wrong argument."""
    if not isinstance(method, str) or not method.isidentifier() or len(method) > MAX_LABEL_CHARS:
        raise _wrong("method", f"the name of a method; code is never sent, got {method!r}")
    if type(timeout_s) not in (int, float) or not 0.0 < timeout_s <= MAX_CALL_S:
        raise _wrong("timeout", f"more than 0 and at most {MAX_CALL_S:.0f} seconds, got {timeout_s!r}")
    if ranks is not None:
        if not ranks or len(ranks) > MAX_RANKS or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise _wrong("ranks", f"numbers of ranks, the first one 0, or nothing for all; got {ranks!r}")
        if len(set(ranks)) < len(ranks):
            raise _wrong("ranks", f"each rank once, got {list(ranks)}")
    try:
        arguments = msgspec.json.encode((list(args), dict(kwargs or {})))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise _wrong("args", f"the arguments have to be values that JSON has ({error})") from None
    if len(arguments) > MAX_CALL_BYTES:
        raise _wrong("args", f"{len(arguments)} bytes of JSON; at most {MAX_CALL_BYTES}")
    return RankCall(method, arguments, float(timeout_s), tuple(ranks or ()))


def _wrong(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {problem}", param=param)


def check_weights(path: str | Path, version: str, *, aborts: bool) -> WeightsUpdate:
    """Check the arguments of an update of weights. Raises InvalidRequest."""
    if not 0 < len(str(path)) <= MAX_WEIGHTS_PATH_CHARS:
        raise _wrong("path", f"a directory, in 1 to {MAX_WEIGHTS_PATH_CHARS} characters")
    if not isinstance(version, str) or len(version) > MAX_LABEL_CHARS:
        raise _wrong("weight_version", f"text of at most {MAX_LABEL_CHARS} characters")
    return WeightsUpdate(str(path), version, aborts)


def control_result(item: Item) -> Any:
    """Return the body of a reply as plain data. Raises its error."""
    if isinstance(item, CarouselError):
        raise item.with_traceback(None)
    assert isinstance(item, ControlReply)
    if not item.ok:
        raise error_from_info(msgspec.msgpack.decode(item.body, type=ErrorInfo))
    return msgspec.msgpack.decode(item.body)


def documented_as(other: Callable[..., Any]) -> Callable[[F], F]:
    """Decorator that copies the docstring of another method, which does the same in another kind
    of client.
    """

    def document(call: F) -> F:
        call.__doc__ = other.__doc__
        return call

    return document
