"""Taps: rows of additional outputs, collected during a forward. Knows plans and rows; knows no request.

A step with a row that wants some is not recorded. Its forward runs operation by operation and delivers each
named tensor when it is computed. Of these, the rows are kept at which the step samples, and those of prompt
positions that the plan asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.attention.taps import StepTaps
from model_worker.device.base import Device
from model_worker.runner.prompt_positions import num_positions
from model_worker.runner.sampled_places import sampled_places
from runtime.wire.format import LongArray, unpack_ids
from runtime.wire.plan import BatchPlan, RowSetup, StepTensor


class Wish(NamedTuple):
    """Names that a row wants, and where its output begins."""

    names: tuple[str, ...]
    num_prompt: int


@dataclass(slots=True)
class TappedRows:
    """Rows of a step's additional outputs, on the host once the step is done."""

    of_rows: Mapping[int, Wish]  # by place in the plan's `rows`
    values: dict[str, Tensor]  # [m, width] float32, by name
    sampled: LongArray  # [s] which of the S sampled places they belong to; the m - s others are of prompts

    def accepted(self, kept: np.ndarray) -> TappedRows:
        """Return the part for those of the S sampled positions that `kept`, a mask, selects; indices then
        refer to these.
        """
        stays = kept[self.sampled]
        rows = np.concatenate([stays, np.ones(self._num_context, bool)])
        picked = torch.from_numpy(rows)
        values = {name: value[picked] for name, value in self.values.items()}
        return replace(self, values=values, sampled=self.sampled[stays])

    @property
    def _num_context(self) -> int:
        return next((len(value) for value in self.values.values()), 0) - len(self.sampled)

    def described(self, plan: BatchPlan, max_bytes: int) -> Iterator[tuple[StepTensor, Tensor]]:
        """Yield descriptions and rows, at most max_bytes at a time."""
        index, position, _ = sampled_places(plan)
        for n, at in enumerate(self.sampled.tolist()):
            wish, start = self.of_rows[index.item(at)], position.item(at) - 1
            for name in wish.names if start >= wish.num_prompt else ():
                yield _described(index.item(at), f"generation_{name}", start, self.values[name][n : n + 1])
        starts, first_row = unpack_ids(plan.starts), len(self.sampled)
        for entry in plan.prompt_positions:
            if not entry.returns_outputs:
                continue
            num_rows = num_positions(entry)
            for name in self.of_rows[entry.index].names:
                rows = self.values[name][first_row : first_row + num_rows]
                at_a_time = max(1, max_bytes // (rows.element_size() * rows.shape[1]))
                start = starts.item(entry.index) + entry.first
                for low in range(0, num_rows, at_a_time):
                    some = rows[low : low + at_a_time]
                    yield _described(entry.index, f"context_{name}", start + low, some)
            first_row += num_rows


def _described(index: int, name: str, start: int, rows: Tensor) -> tuple[StepTensor, Tensor]:
    return StepTensor(index, name, start, (rows.shape[0], rows.shape[1])), rows


class Taps:
    """Additional outputs that rows want. Plans come in the order of their launch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._wishes: dict[int, Wish] = {}

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Record what new holders of rows want."""
        for setup in setups:
            if setup.outputs:
                self._wishes[setup.row] = Wish(setup.outputs, setup.num_prompt)
            else:
                self._wishes.pop(setup.row, None)

    def of_rows(self, plan: BatchPlan) -> dict[int, Wish]:
        """Return the wishes by index in the plan's `rows`; empty if no row has one."""
        if not self._wishes:
            return {}
        wishes = self._wishes
        rows = unpack_ids(plan.rows).tolist()
        return {index: wishes[row] for index, row in enumerate(rows) if row in wishes}

    def of_step(
        self, plan: BatchPlan, output_indices: Tensor | None
    ) -> tuple[StepTaps, TappedRows] | tuple[None, None]:
        """Return the collector for a forward's outputs, and the results that it will contain; (None, None) if
        no row wants any. output_indices: of the plan's batch.
        """
        of_rows = self.of_rows(plan)
        if not of_rows:
            return None, None
        index, position, _ = sampled_places(plan)
        sampled = np.array(
            [
                at
                for at, (row, end) in enumerate(zip(index.tolist(), position.tolist(), strict=True))
                if row in of_rows and end > of_rows[row].num_prompt
            ],
            np.int64,
        )
        places, first = [sampled], len(index)
        for entry in plan.prompt_positions:
            num_rows = num_positions(entry)
            if entry.returns_outputs:
                places.append(np.arange(first, first + num_rows))
            first += num_rows
        at = self._device.tensor(np.concatenate(places))
        names = frozenset(name for wish in of_rows.values() for name in wish.names)
        tokens = at if output_indices is None else output_indices[at]
        taps = StepTaps(names, at, tokens, self._device.download)
        return taps, TappedRows(of_rows, taps.values, sampled)
