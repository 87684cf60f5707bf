"""InputBuffers: copies a step's integers to the device in one transfer. Knows plans; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import cast

import numpy as np
from torch import Tensor

from model_worker.device.base import Device
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.runner.prompt_positions import num_positions
from model_worker.runner.sampled_places import has_drafts, sampled_places
from model_worker.sampling.columns import SampleRows
from runtime.wire.format import IntArray, LongArray, unpack_ids
from runtime.wire.plan import BatchPlan

ALIGNMENT = 2  # elements: 16 bytes


@dataclass(slots=True)
class TokenLayout:
    """The T new tokens of a plan's B sequences, concatenated, on the host."""

    rows: LongArray  # [B]
    token_rows: LongArray  # [T]
    positions: LongArray  # [T] in the sequence
    query_start: list[int]  # [B + 1]
    kv_lens: list[int]  # [B] after this step
    sample_indices: LongArray  # [S] the tokens after which one is sampled, index into T
    sample_rows: LongArray  # [S]
    sample_positions: LongArray  # [S] of the token to be sampled
    guesses: LongArray | None = None  # [S] see sampling/guesses.py; of a plan with drafts


@dataclass(slots=True)
class StepInputs:
    """A plan's tokens on the device, int64, and the rows whose next tokens are to be sampled."""

    input_ids: Tensor  # [T], negative where the token is in the FutureMap
    unresolved: Tensor  # [U] where input_ids are negative
    unresolved_rows: Tensor  # [U]
    positions: Tensor  # [T]
    table_entries: Tensor  # [T] index into the flattened page table
    rows: Tensor  # [B]
    token_rows: Tensor | None  # [T]; None: nobody asked for them
    query_start: list[int]
    kv_lens: list[int]
    output_indices: Tensor  # [W] the tokens that are sampled after, then the prompt positions
    sample_rows: SampleRows


class InputBuffers:
    def __init__(self, table: ReqToTokenPool, device: Device) -> None:
        self._table = table
        self._device = device

    def stage(self, plan: BatchPlan, *, with_token_rows: bool = False) -> StepInputs:
        """Expand a plan to one entry for each token and upload it. Changes nothing else on the device."""
        at = _lay_out(plan)
        ids_host = unpack_ids(plan.input_ids)
        assert len(ids_host) == len(at.positions), "input_ids does not match lens"
        unknown = np.flatnonzero(ids_host < 0)
        input_ids, unresolved, unresolved_rows, positions, entries, rows, outputs, *rest = self._upload(
            ids_host,
            unknown,
            at.token_rows[unknown],
            at.positions,
            self._table.entry_of(at.token_rows, at.positions),
            at.rows,
            _output_indices(plan, at),
            at.sample_rows,
            at.sample_positions,
            *((at.token_rows,) if with_token_rows else ()),
        )
        who_rows, who_positions, *token_rows = rest
        return StepInputs(
            input_ids=input_ids,
            unresolved=unresolved,
            unresolved_rows=unresolved_rows,
            positions=positions,
            table_entries=entries,
            rows=rows,
            token_rows=token_rows[0] if with_token_rows else None,
            query_start=at.query_start,
            kv_lens=at.kv_lens,
            output_indices=outputs,
            sample_rows=SampleRows(
                who_rows,
                who_positions,
                at.sample_rows,
                at.sample_positions,
                at.guesses,
            ),
        )

    def _upload(self, *arrays: LongArray | IntArray) -> Sequence[Tensor]:
        """Upload all arrays in one copy, and return each as an int64 tensor on the device."""
        # All at addresses of one alignment: Triton compiles a kernel anew for another.
        sizes = [(len(array), -len(array) % ALIGNMENT) for array in arrays]
        ends = list(accumulate(map(sum, sizes)))
        block = self._device.host_block(ends[-1])
        view = block.numpy()
        for array, start in zip(arrays, [0, *ends], strict=False):
            view[start : start + len(array)] = array
        parts = self._device.upload(block).split(list(chain.from_iterable(sizes)))
        return cast(Sequence[Tensor], parts[::2])


def _output_indices(plan: BatchPlan, at: TokenLayout) -> LongArray:
    """Return the indices of tokens whose hidden states are wanted: first the tokens after which one is
    sampled, then prompt positions.
    """
    if not plan.prompt_positions:
        return at.sample_indices
    wanted, drafts = [at.sample_indices], unpack_ids(plan.drafts)
    for entry in plan.prompt_positions:
        assert entry.index >= plan.num_decodes, "prompt_positions of a row that decodes"
        end = at.query_start[entry.index + 1] - drafts.item(entry.index - plan.num_decodes)
        first = at.query_start[entry.index] + entry.first
        assert end - first == num_positions(entry) > 0, "prompt_positions end where their chunk does"
        wanted.append(np.arange(first, end))
    return np.concatenate(wanted)


def _lay_out(plan: BatchPlan) -> TokenLayout:
    rows = unpack_ids(plan.rows).astype(np.int64)
    starts = unpack_ids(plan.starts).astype(np.int64)
    num_rows = len(rows)
    if num_rows == plan.num_decodes:  # one token each, one sampled each: nothing to expand
        ends = starts + 1
        order = np.arange(num_rows)
        return TokenLayout(rows, rows, starts, list(range(num_rows + 1)), ends.tolist(), order, rows, ends)
    lens = np.ones(num_rows, np.int64)
    lens[plan.num_decodes :] = unpack_ids(plan.lens)
    samples = np.ones(num_rows, bool)
    samples[plan.num_decodes :] = unpack_ids(plan.samples)
    query_ends = np.cumsum(lens)
    kv_lens = starts + lens
    token_rows = np.repeat(rows, lens)
    layout = TokenLayout(
        rows=rows,
        token_rows=token_rows,
        positions=np.repeat(kv_lens - query_ends, lens) + np.arange(len(token_rows)),
        query_start=[0, *query_ends.tolist()],
        kv_lens=kv_lens.tolist(),
        sample_indices=query_ends[samples] - 1,
        sample_rows=rows[samples],
        sample_positions=kv_lens[samples],
    )
    if has_drafts(plan):
        _add_places(layout, plan)
    return layout


def _add_places(layout: TokenLayout, plan: BatchPlan) -> None:
    """Add the positions before each guess, at which tokens are sampled, too."""
    of, layout.sample_positions, layout.guesses = sampled_places(plan)
    layout.sample_rows = layout.rows[of]
    end_of = np.array(layout.query_start)[of + 1] - np.array(layout.kv_lens)[of]
    layout.sample_indices = end_of + layout.sample_positions - 1
