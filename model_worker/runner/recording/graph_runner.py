"""GraphRunner: a step of decodes as CUDA graphs, one pair for each of a few batch sizes.

    host block ─copy─► ids, positions, rows, new page table entries
    graph 1            page table → last tokens for unknown ids → slots → model → logits
    graph 2            draw from the rows' own columns → last token of each row

Everything that differs between steps is addressed by row or lies in the block, so a step is one small copy
and two launches, whoever is in the batch. A batch between two sizes is padded with a row that belongs to no
request. Steps that sample with more than a draw (logprobs, penalties, masks …) take graph 1 and the Sampler;
steps with a chunk of a prompt are not recorded. Knows plans and rows; knows no request.

Steps with an adapter have graphs of their own, too, so that other steps launch no kernels for adapters.

A row with guesses is as many decodes as it has tokens, whose keys and values are all stored before any of
them attends. Such steps have graphs of their own, of a few numbers of tokens.

Of several ranks each records its part of graph 1, collectives included, in the same order of sizes. Graph 2
is rank 0's alone: only it knows how a row is sampled, and it sends the tokens to the others by themselves.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device.base import Graph
from model_worker.device.out_of_memory import when_out_of_memory
from model_worker.memory.kv_pool import DUMMY_PAGE, MHATokenToKVPool
from model_worker.runner.recording.base import StepParts
from model_worker.runner.sampled_places import has_drafts, sampled_places
from model_worker.runner.step_output import ForwardOutput
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.ops.base import DrawKind
from model_worker.sampling.sampler import Sampler
from runtime.base.progress import Progress
from runtime.wire.format import TOKEN_BYTES, LongArray, unpack_ids
from runtime.wire.plan import BatchPlan

logger = logging.getLogger(__name__)

# Most tokens of a recorded step with guesses, unless there are more rows. Arbitrary: each takes a row of
# logits.
MOST_TOKENS = 256
NUM_COLUMNS = 5  # of the block: ids, positions, rows, table entries, pages


class RecordableModel(Protocol):
    stays_on_device: bool

    def __call__(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """Return final hidden states [W, hidden_size], by kernels only: nothing is read on the host."""

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [n, vocab_size] float32 for hidden [n, hidden_size], in `out` if it is given."""


def can_record(model: object, backend: AttentionBackend) -> TypeGuard[RecordableModel]:
    """Return True if model and backend read nothing on the host; log a line if not."""
    for part in (model, backend):
        if not getattr(part, "stays_on_device", False):
            logger.warning(
                "no CUDA graphs: %s does not say that it stays on the device; small batches are slower",
                type(part).__name__,
            )
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Recorded:
    forward: Graph
    draws: dict[DrawKind, Graph]


class _Kind(NamedTuple):
    size: int  # tokens, as many as rows without guesses
    guesses: bool
    adapters: bool = False


class GraphRunner:
    """Recorded decode steps as CUDA graphs. Its methods must run on the forward stream."""

    def __init__(self, model: RecordableModel, parts: StepParts) -> None:
        """model: the model of the parts, which can be recorded."""
        sizes, device = parts.sizes, parts.device
        self._model = model
        self._ops = parts.ops
        self._device = device
        self._kv_pool = parts.kv_pool
        self._table = parts.table
        self._future = parts.future
        self._sampler = parts.sampler
        self._sizes = {False: list(sizes), True: verification_sizes(sizes[-1], parts.max_guesses)}
        self._row_adapters = parts.row_adapters
        self._max_len = parts.max_len
        self._dummy_row = parts.table.max_rows
        self._dummy_entry = self._dummy_row * parts.table.max_pages
        largest, at = max(sizes[-1], *self._sizes[True], 0), device.torch_device
        self._block = torch.zeros(NUM_COLUMNS * largest, dtype=torch.int64, device=at)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=at)  # of the tokens to be sampled
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=at)
        num_logits = 0 if parts.sampler is None else largest
        self._logits = torch.empty((num_logits, parts.vocab_size), dtype=torch.float32, device=at)
        self._recorded: dict[_Kind, _Recorded] = {}

    def capture(self, on_progress: Callable[[], None]) -> None:
        """Record every size, the largest first, because the others then fit into its memory. on_progress is
        called after each. Raises ConfigError if the memory does not suffice.
        """
        adapters = [False] if self._row_adapters is None else [False, True]
        kinds = sorted(
            (_Kind(size, k, a) for k, sizes in self._sizes.items() for size in sizes for a in adapters),
            reverse=True,
        )
        progress = Progress("recording CUDA graphs", "graphs", say=logger.info)
        for count, kind in enumerate(kinds):
            size = kind.size
            logger.debug("recording CUDA graphs: batch size %d, %d of %d", size, count + 1, len(kinds))
            progress.note(count, len(kinds))
            empty = np.empty(0, np.int64)
            self._stage(size, empty, empty, empty, empty, empty)
            remedy = (
                "record less with --cuda-graph-max-bs or --disable-cuda-graph, or lower --mem-fraction-static"
            )
            with when_out_of_memory(f"recording the decode step of {size} rows", remedy):
                self._recorded[kind] = self._capture_kind(kind)
            on_progress()
        progress.note(len(kinds), len(kinds))

    def fits(self, plan: BatchPlan) -> bool:
        """Return True if each row of the plan computes one token and samples one, and there are no more rows
        than in the largest size. Rows with features are not among the plan's decodes, but may do just that.
        """
        num_rows = len(plan.rows) // TOKEN_BYTES
        if not 0 < num_rows <= self._sizes[False][-1] or plan.prompt_positions:
            return False
        if not has_drafts(plan):
            return plan.lens == plan.samples and bool((unpack_ids(plan.lens) == 1).all())
        largest = max(self._sizes[True], default=0)
        if len(plan.input_ids) // TOKEN_BYTES > largest:
            return False
        lens, samples = unpack_ids(plan.lens), unpack_ids(plan.samples)
        return bool((samples == 1).all() and (lens == unpack_ids(plan.drafts) + 1).all())

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> ForwardOutput:
        """Compute the tokens of a plan that `fits`, including its page table changes, but without its setups.
        The result is valid until the next step.
        """
        rows = unpack_ids(plan.rows).astype(np.int64)
        starts = unpack_ids(plan.starts).astype(np.int64)
        guesses = None
        if has_drafts(plan):
            index, positions, guesses = sampled_places(plan)
            rows, starts = rows[index], positions - 1
        n = len(rows)
        sizes = self._sizes[guesses is not None]
        adapters = self._row_adapters
        has_adapters = adapters is not None and adapters.have_any(rows)
        kind = _Kind(sizes[bisect_left(sizes, n)], guesses is not None, has_adapters)
        entries, pages = self._new_pages(plan, kind.size)
        self._stage(kind.size, unpack_ids(plan.input_ids), starts, rows, entries, pages)
        recorded = self._recorded[kind]
        recorded.forward.replay()
        sample_rows = SampleRows(
            self._column(2, kind.size)[:n], self._positions[:n], rows, starts + 1, guesses
        )
        return ForwardOutput(self._logits[:n], sample_rows, draw=partial(self._try_draw, recorded, rows))

    def _try_draw(self, recorded: _Recorded, rows: LongArray) -> Tensor | None:
        """Draw tokens as ForwardOutput.draw says. rows: of the step just computed. The tokens are valid until
        the next step.
        """
        kind = None if self._sampler is None else self._sampler.draw_kind(rows)
        if kind is None:
            return None
        recorded.draws[kind].replay()
        return self._tokens[: len(rows)]

    def _new_pages(self, plan: BatchPlan, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the plan's new page table entries and their pages, at most `size` of them. Entries that do
        not fit into the block are written separately.
        """
        pages = unpack_ids(plan.table_pages)
        spans = unpack_ids(plan.table_spans).reshape(-1, 3)
        if len(pages) > size:
            self._table.write(spans, pages)
            return pages[:0], pages[:0]
        return self._table.entries_of(spans, len(pages)), pages

    def _column(self, index: int, size: int) -> Tensor:
        return self._block[index * size : (index + 1) * size]

    def _stage(
        self,
        size: int,
        ids: np.ndarray,
        starts: np.ndarray,
        rows: np.ndarray,
        entries: np.ndarray,
        pages: np.ndarray,
    ) -> None:
        """Copy a step's integers, padded to `size`, into the block that the graphs of that size read."""
        host = self._device.host_block(NUM_COLUMNS * size)
        columns = host.numpy().reshape(NUM_COLUMNS, size)
        padding = (0, 0, self._dummy_row, self._dummy_entry, DUMMY_PAGE)
        for column, values, fill in zip(columns, (ids, starts, rows, entries, pages), padding, strict=True):
            column[: len(values)] = values
            column[len(values) :] = fill
        self._block[: NUM_COLUMNS * size].copy_(host, non_blocking=True)

    def _capture_kind(self, kind: _Kind) -> _Recorded:
        capture, size = self._device.capture, kind.size
        forward = capture(partial(self._compute, kind))
        sampler = self._sampler
        if sampler is None:
            return _Recorded(forward, {})
        like_it = self._recorded.get(kind._replace(adapters=not kind.adapters))
        if like_it is not None:
            return _Recorded(forward, like_it.draws)
        return _Recorded(
            forward, {draw: capture(partial(self._draw, sampler, size, draw)) for draw in DrawKind}
        )

    def _compute(self, kind: _Kind) -> None:
        """Compute from the block to the logits; graph 1 records this."""
        size = kind.size
        ids, starts, rows, entries, pages = (self._column(i, size) for i in range(NUM_COLUMNS))
        table = self._table
        lens, last_token = self._positions[:size], self._future.last_token
        slots = self._ops.lay_out_decodes(
            ids, rows, starts, entries, pages, last_token, table.page_table, table.page_size, lens=lens
        )
        batch = ForwardBatch(
            input_ids=ids,
            positions=starts,
            out_slots=slots,
            query_start=list(range(size + 1)),
            # Unknown at recording time: the backend must read lengths on the device, and be prepared for
            # these.
            kv_lens=[self._max_len] * size,
            rows=rows,
            page_table=table.page_table,
            page_size=table.page_size,
            num_decodes=size,
            output_indices=None,
            rows_repeat=kind.guesses,
            decode_lens=lens,
            adapter_rows=rows if kind.adapters else None,
        )
        self._ops.attention.prepare(batch)
        hidden = self._model(batch, self._kv_pool, self._ops.attention)
        self._model.compute_logits(hidden, out=self._logits[:size])

    def _draw(self, sampler: Sampler, size: int, kind: DrawKind) -> None:
        """Compute from the logits to the tokens; graph 2 records this."""
        sampler.ops.draw_by_row(
            self._logits[:size],
            self._column(2, size),
            self._positions[:size],
            kind,
            out=self._tokens[:size],
            last_token=self._future.last_token,
        )


def verification_sizes(num_rows: int, max_guesses: int) -> list[int]:
    """Return the numbers of tokens, ascending, for which steps with guesses are recorded: powers of two, and
    the most that num_rows rows may have. A padded step hardly takes longer, because it reads the same
    weights.
    """
    largest = min(num_rows * (1 + max_guesses), max(num_rows, MOST_TOKENS)) if max_guesses else 0
    powers = (1 << i for i in range(1, largest.bit_length()))
    return sorted({size for size in powers if size < largest} | ({largest} if largest else set()))


def record(parts: StepParts, on_progress: Callable[[], None]) -> GraphRunner | None:
    """Record the parts' sizes, if model and backend read nothing on the host; otherwise return None."""
    model = parts.model
    if not parts.sizes or not can_record(model, parts.ops.attention):
        return None
    if parts.max_guesses and not getattr(parts.ops.attention, "repeats_rows", False):
        logger.warning(
            "no CUDA graphs of steps with guesses: %s does not say that it takes several tokens of a row",
            type(parts.ops.attention).__name__,
        )
        parts = replace(parts, max_guesses=0)
    graphs = GraphRunner(model, parts)
    graphs.capture(on_progress)
    return graphs
