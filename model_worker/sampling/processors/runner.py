"""ProcessorRunner: calls the launch's logits processors, as TensorRT-LLM's Executor does, on one rank.

Knows rows and their tokens, as plans and SampleMasks tell of them. Of several ranks all call them, with rank
0's logits, or rank 0 alone; what comes out on rank 0 is what is sampled from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from model_worker.device.base import Device
from model_worker.distributed.group import SOLO, RankGroup
from runtime.base.errors import ConfigError
from runtime.base.registry import resolve
from runtime.wire.format import LongArray, unpack_ids
from runtime.wire.plan import BATCHED, RowSetup

logger = logging.getLogger(__name__)

SHARED_AT_ONCE = 1 << 18
"""Logits of one broadcast: as many as a slot of shared memory holds."""
MAX_ERROR_CHARS = 500
Processor: TypeAlias = Callable[..., Any]


@dataclass(slots=True, eq=False)
class _Row:
    request_id: int
    client_id: str | None
    calls: list[tuple[str, dict[str, Any]]]
    tokens: list[int]


@dataclass(slots=True, eq=False)
class _Asked:
    """One row of a step."""

    row: _Row
    place: int
    logits: Tensor  # [1, 1, V], a view
    error: str = ""


class ProcessorRunner:
    """For the stream that samples."""

    def __init__(
        self,
        processors: Mapping[str, Processor],
        device: Device,
        group: RankGroup = SOLO,
        *,
        is_replicated: bool = True,
    ) -> None:
        """`processors`: by name; none on a rank that calls none."""
        self._processors = processors
        self._device = device
        self._group = group
        self._shares = is_replicated and group.size > 1
        self._rows: dict[int, _Row] = {}
        self._asked: Sequence[int] = ()

    def open_row(self, setup: RowSetup) -> None:
        """A row has a new tenant; one without processors is none of ours."""
        self._rows.pop(setup.row, None)
        if (processing := setup.processing) is not None:
            calls = [(call.name, call.keywords()) for call in processing.calls]
            tokens = unpack_ids(setup.history_ids).tolist()
            self._rows[setup.row] = _Row(processing.request_id, processing.client_id or None, calls, tokens)

    def expect(self, processed: Sequence[tuple[int, bytes]]) -> None:
        """Take the tokens of the rows whose processors are called in the step that is sampled next."""
        for row, ids in processed:
            self._rows[row].tokens += unpack_ids(ids).tolist()
        self._asked = [row for row, _ in processed]

    def run(self, logits: Tensor, rows_host: LongArray) -> list[tuple[int, str]]:
        """Call the processors of the rows that are expected, among logits [S, V] of rows_host, in place; on
        ranks other than 0 the logits have no rows. Returns where one has failed, and how.
        """
        if not self._asked:
            return []
        place_of = {row: place for place, row in enumerate(rows_host.tolist())}
        asked = [
            _Asked(self._rows[row], place_of[row], self._logits_of(logits, place_of[row]))
            for row in self._asked
        ]
        self._asked = ()
        stream = self._device.current_stream()
        for each in asked:
            self._call_single(each, stream)
        self._call_batched([each for each in asked if not each.error], stream)
        failed = [each for each in asked if each.error]
        for each in failed:
            each.logits.zero_()  # what is drawn counts for nothing, but is drawn
        return [(each.place, each.error) for each in failed]

    def _logits_of(self, logits: Tensor, place: int) -> Tensor:
        is_first = self._group.rank == 0
        own = logits[place] if is_first else logits.new_empty(logits.shape[1])
        if self._shares:
            for part in own.split(SHARED_AT_ONCE):
                shared = self._group.broadcast(part)
                if shared is not part:
                    part.copy_(shared)
        return own.view(1, 1, -1)

    def _call_single(self, asked: _Asked, stream: int | None) -> None:
        row = asked.row
        for name, keywords in row.calls:
            if name == BATCHED:
                continue
            tokens = [row.tokens.copy()]
            try:
                made = self._processors[name](
                    row.request_id, asked.logits, tokens, stream, row.client_id, **keywords
                )
                _take(made, asked.logits)
            except Exception as error:
                asked.error = _said(name, error)
                return

    def _call_batched(self, asked: list[_Asked], stream: int | None) -> None:
        batch = [each for each in asked if any(name == BATCHED for name, _ in each.row.calls)]
        if not batch:
            return
        rows = [each.row for each in batch]
        try:
            made = self._processors[BATCHED](
                [row.request_id for row in rows],
                [each.logits for each in batch],
                [[row.tokens.copy()] for row in rows],
                stream,
                [row.client_id for row in rows],
            )
            for each, one in zip(batch, [None] * len(batch) if made is None else made, strict=True):
                _take(one, each.logits)
        except Exception as error:
            said = _said(BATCHED, error)
            for each in batch:
                each.error = said


def _take(made: Any, logits: Tensor) -> None:
    """Put what a processor has returned in the logits' place; None: it has changed them."""
    if made is None or made is logits:
        return
    if not isinstance(made, Tensor) or made.numel() != logits.numel():
        raise TypeError(f"it returned no tensor of shape {tuple(logits.shape)}, and not None")
    logits.copy_(made.view_as(logits))


def _said(name: str, error: Exception) -> str:
    logger.warning("logits processor %s failed", name, exc_info=error)
    return f"logits processor {name} failed: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


def load_processors(paths: Mapping[str, str]) -> dict[str, Processor]:
    """Import the classes and make one object of each. `paths`: `module:Class` by name. Raises ConfigError
    that names the setting.
    """
    made: dict[str, Processor] = {}
    for name, path in paths.items():
        try:
            processor = resolve("logits_processor", path, {})()
        except ConfigError:
            raise
        except Exception as error:
            logger.warning("logits processor %s=%s cannot be made", name, path, exc_info=error)
            raise ConfigError(f"logits_processor: {name}={path}: {type(error).__name__}: {error}") from error
        if not callable(processor):
            raise ConfigError(f"logits_processor: {name}={path}: its objects cannot be called")
        made[name] = processor
    return made
