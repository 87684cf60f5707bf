"""RankMethods: methods that may be called on a rank between two steps: `ping`, and those of the class that
the settings name. Knows no socket. It runs in the thread that launches steps, so no step is launched
meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from model_worker.models.base import Model
from runtime.base.errors import ConfigError
from runtime.base.registry import resolve
from runtime.wire.plan import MAX_CALL_BYTES, CallRank, RankAnswer

logger = logging.getLogger(__name__)

MAX_ERROR_CHARS = 1000
_decode_arguments = msgspec.json.Decoder(tuple[list[Any], dict[str, Any]]).decode


class RankView:
    """A rank as seen by the class of --worker-extension-cls."""

    def __init__(self, rank: int, num_ranks: int, model: Model, beat: Callable[[], None]) -> None:
        self.rank = rank
        """Number of this rank in the model, from 0."""
        self.num_ranks = num_ranks
        self.model = model
        """This rank's part of the model."""
        self.num_steps = 0
        """Number of the step that was launched last."""
        self.beat = beat
        """Function that shows that the process is alive. A method must call it every few seconds while it
        works.
        """


class RankMethods:
    """Runs calls to this rank, one at a time."""

    def __init__(self, view: RankView, extension: object | None = None) -> None:
        """extension: object whose public methods may be called; None: only `ping`."""
        self.view = view
        self._extension = extension

    def run(self, call: CallRank, num_steps: int) -> RankAnswer:
        """Call the method. num_steps: number of the last launched step. An exception becomes the answer."""
        self.view.num_steps = num_steps
        try:
            args, kwargs = _decode_arguments(call.arguments)
            value = msgspec.json.encode(self._method(call.method)(*args, **kwargs))
            if len(value) > MAX_CALL_BYTES:
                raise ValueError(f"it returned {len(value)} bytes of JSON; at most {MAX_CALL_BYTES}")
        except Exception as error:
            logger.warning("the call of %s failed", call.method, exc_info=error)
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            return RankAnswer(self.view.rank, call.number, error=text)
        return RankAnswer(self.view.rank, call.number, value)

    def ping(self) -> dict[str, int]:
        """Return this rank's number, and the number of the step that was launched last."""
        return {"rank": self.view.rank, "num_steps": self.view.num_steps}

    def _method(self, name: str) -> Callable[..., Any]:
        if name == "ping":
            return self.ping
        method: Any = None if name.startswith("_") else getattr(self._extension, name, None)
        if not callable(method):
            raise AttributeError(f"there is no method {name}: ping, and those of --worker-extension-cls")
        bound: Callable[..., Any] = method
        return bound


def load_methods(path: str, view: RankView) -> RankMethods:
    """Make an object of the class at `path`, `module:Class` or empty for none. Raises ConfigError."""
    if not path:
        return RankMethods(view)
    try:
        return RankMethods(view, resolve("worker_extension_cls", path, {})(view))
    except ConfigError:
        raise
    except Exception as error:
        logger.warning("the worker extension %s cannot be made", path, exc_info=error)
        raise ConfigError(f"worker_extension_cls: {path}: {type(error).__name__}: {error}") from error
