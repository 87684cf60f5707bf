"""ProcessorRunner: calls the launch's logits processors, as TensorRT-LLM's Executor does, on one rank.

It knows rows and their tokens from plans and SampleMasks. The rows of a beam search have one call together,
with a beam each. Of several ranks either all call the processors with rank 0's logits, or rank 0 alone. The
result on rank 0 is sampled from, or read by the beam search.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.sampling.step import NO_ROWS
from runtime.base.errors import ConfigError
from runtime.base.registry import resolve
from runtime.wire.format import LongArray, unpack_ids
from runtime.wire.plan import BATCHED, ProcessedRow, RowSetup

logger = logging.getLogger(__name__)

SHARED_AT_ONCE = 1 << 18
"""Logits in one broadcast: as many as fit into a slot of shared memory."""
MAX_ERROR_CHARS = 500
MAX_SCORE = 1e30
"""Largest score that a processor may leave for a beam's token, so that sums are still numbers."""
Processor: TypeAlias = Callable[..., Any]


@dataclass(slots=True, eq=False)
class _Row:
    request_id: int
    client_id: str | None
    calls: list[tuple[str, dict[str, Any]]]
    searches: bool
    tokens: list[int]


@dataclass(slots=True, eq=False)
class _Asked:
    """A call for one sequence of a step, or one beam search with its beams in order."""

    row: _Row
    beams: list[_Row]
    places: list[int]
    logits: Tensor  # [1, beams, V]; of a sequence a view
    error: str = ""

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each beam. The processors may change the lists."""
        return [beam.tokens.copy() for beam in self.beams]


class ProcessorResults(NamedTuple):
    """Results of a step's calls, besides the changed logits of sequences without beam search."""

    errors: Sequence[tuple[int, str]] = ()
    """Indices of the step's rows whose processor has failed, with the reason."""
    scores: Tensor | None = None
    """Scores [m, V] float32 that processors made from the log-probabilities of beam search rows."""
    scores_of: LongArray = NO_ROWS
    """Indices [m] of these rows in the step."""


class ProcessorRunner:
    """Calls processors. Used on the stream that samples."""

    def __init__(
        self,
        processors: Mapping[str, Processor],
        device: Device,
        group: RankGroup = SOLO,
        *,
        is_replicated: bool = True,
    ) -> None:
        """processors: by name; empty on a rank that calls none."""
        self._processors = processors
        self._device = device
        self._group = group
        self._shares = is_replicated and group.size > 1
        self._rows: dict[int, _Row] = {}
        self._asked: Sequence[Sequence[int]] = ()
        """Rows of each call of the next step."""

    def open_row(self, setup: RowSetup) -> None:
        """Record a row's new holder. One without processors is not kept."""
        self._rows.pop(setup.row, None)
        if (processing := setup.processing) is not None:
            calls = [(call.name, call.keywords()) for call in processing.calls]
            tokens = unpack_ids(setup.history_ids).tolist()
            self._rows[setup.row] = _Row(
                processing.request_id, processing.client_id or None, calls, processing.searches, tokens
            )

    def expect(self, processed: Sequence[ProcessedRow]) -> None:
        """Record the tokens of the rows whose processors are called in the step that is sampled next."""
        by_request: dict[int, list[ProcessedRow]] = {}
        for each in processed:
            row = self._rows[each.row]
            if each.source != each.row:
                row.tokens = self._rows[each.source].tokens[: each.start]
            row.tokens[each.start :] = unpack_ids(each.ids).tolist()
            by_request.setdefault(row.request_id, []).append(each)
        self._asked = [
            [each.row for each in sorted(beams, key=lambda each: each.beam)] for beams in by_request.values()
        ]

    def run(self, logits: Tensor, rows_host: LongArray) -> ProcessorResults:
        """Call the processors of the expected rows among logits [S, V] of rows_host. Logits are changed in
        place, except those of beam searches. On ranks other than 0 the logits have no rows.
        """
        if not self._asked:
            return ProcessorResults()
        place_of = {row: place for place, row in enumerate(rows_host.tolist())}
        asked = [self._ask(rows, [place_of[row] for row in rows], logits) for rows in self._asked]
        self._asked = ()
        stream = self._device.current_stream()
        for each in asked:
            self._call_single(each, stream)
        self._call_batched([each for each in asked if not each.error], stream)
        failed = [each for each in asked if each.error]
        for each in failed:
            each.logits.zero_()  # the row is drawn all the same, but the token does not count
        errors = [(place, each.error) for each in failed for place in each.places]
        searches = [each for each in asked if each.row.searches]
        if not searches:
            return ProcessorResults(errors)
        scores = torch.cat([each.logits[0] for each in searches])
        scores.nan_to_num_(nan=-math.inf, posinf=MAX_SCORE, neginf=-math.inf).clamp_(max=MAX_SCORE)
        places = [place for each in searches for place in each.places]
        return ProcessorResults(errors, scores, np.array(places, np.int64))

    def _ask(self, rows: Sequence[int], places: list[int], logits: Tensor) -> _Asked:
        beams = [self._rows[row] for row in rows]
        is_first = self._group.rank == 0
        if not is_first:
            own = logits.new_empty((len(places), logits.shape[1]))
        elif beams[0].searches:
            own = torch.log_softmax(logits[places], dim=1)
        else:
            own = logits[places[0] : places[0] + 1]
        if self._shares:
            for part in own.view(-1).split(SHARED_AT_ONCE):
                shared = self._group.broadcast(part)
                if shared is not part:
                    part.copy_(shared)
        return _Asked(beams[0], beams, places, own.unsqueeze(0))

    def _call_single(self, asked: _Asked, stream: int | None) -> None:
        row = asked.row
        for name, keywords in row.calls:
            if name == BATCHED:
                continue
            try:
                made = self._processors[name](
                    row.request_id, asked.logits, asked.tokens(), stream, row.client_id, **keywords
                )
                _take(made, asked.logits)
            except Exception as error:
                asked.error = _said(name, error)
                return

    def _call_batched(self, asked: list[_Asked], stream: int | None) -> None:
        batch = [each for each in asked if any(name == BATCHED for name, _ in each.row.calls)]
        if not batch:
            return
        try:
            made = self._processors[BATCHED](
                [each.row.request_id for each in batch],
                [each.logits for each in batch],
                [each.tokens() for each in batch],
                stream,
                [each.row.client_id for each in batch],
            )
            for each, one in zip(batch, [None] * len(batch) if made is None else made, strict=True):
                _take(one, each.logits)
        except Exception as error:
            said = _said(BATCHED, error)
            for each in batch:
                each.error = said


def _take(made: Any, logits: Tensor) -> None:
    """Copy a processor's result into the logits; None: it has changed them in place."""
    if made is None or made is logits:
        return
    if not isinstance(made, Tensor) or made.numel() != logits.numel():
        raise TypeError(f"it returned no tensor of shape {tuple(logits.shape)}, and not None")
    logits.copy_(made.view_as(logits))


def _said(name: str, error: Exception) -> str:
    logger.warning("logits processor %s failed", name, exc_info=error)
    return f"logits processor {name} failed: {type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


def load_processors(paths: Mapping[str, str]) -> dict[str, Processor]:
    """Import the classes and make one object of each. paths: `module:Class` by name. Raises ConfigError,
    which names the setting.
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
