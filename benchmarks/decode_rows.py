"""Rows of equal length for benchmarks: their KV pool, the plan that opens them, and that of a decode step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from model_worker.memory.kv_pool import KVLayout, MHATokenToKVPool
from runtime.wire.format import pack_ids
from runtime.wire.plan import BatchPlan, RowSetup
from runtime.wire.sampling_params import SamplingParams

PAGE_SIZE = 16


def pages_for(context: int) -> int:
    """Return the number of pages of a row with that many tokens, including the one that is decoded."""
    return -(-context // PAGE_SIZE)


def filled_pool(
    layout: KVLayout, batch: int, context: int, dtype: torch.dtype, device: torch.device | str
) -> MHATokenToKVPool:
    """Return a pool with room for the rows, filled with random keys and values."""
    pool = MHATokenToKVPool(
        batch * pages_for(context),
        PAGE_SIZE,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        dtype,
        device,
    )
    for layer in range(layout.num_layers):
        for buffer in pool.layer(layer):
            buffer.normal_()
    return pool


def opening_plan(batch: int, context: int, num_pages: int, **sampling: Any) -> BatchPlan:
    """Return a plan that gives rows 0 .. batch - 1 scattered pages of a pool of num_pages, and sampling
    parameters (default: greedy), and decodes their first tokens.
    """
    per_row = pages_for(context)
    pages = np.random.default_rng(0).permutation(num_pages)[: batch * per_row] + 1
    rows = np.arange(batch)
    spans = np.stack([rows, np.zeros_like(rows), np.full_like(rows, per_row)], axis=1)
    return _plan(
        batch,
        context,
        ids=rows,
        setups=tuple(
            RowSetup.of(row, context - 1, SamplingParams(**({"temperature": 0.0} | sampling)))
            for row in range(batch)
        ),
        table_spans=pack_ids(spans),
        table_pages=pack_ids(pages),
    )


def decode_plan(batch: int, context: int) -> BatchPlan:
    """Return a plan that decodes the same position of the opened rows again, after their last tokens."""
    return _plan(batch, context, ids=np.full(batch, -1))


def verification_plan(batch: int, context: int, num_guesses: int) -> BatchPlan:
    """Return a plan that decodes that position and the ones before it, all but the first of which are guesses
    that are unlikely to be right.
    """
    ids = np.full((batch, 1 + num_guesses), 7)
    ids[:, 0] = -1
    return _plan(
        batch,
        context - num_guesses,
        ids.ravel(),
        num_decodes=0,
        lens=pack_ids([1 + num_guesses] * batch),
        samples=pack_ids([1] * batch),
        drafts=pack_ids([num_guesses] * batch),
    )


def _plan(batch: int, context: int, ids: np.ndarray, **changes: Any) -> BatchPlan:
    fields: dict[str, Any] = {"setups": (), "page_copies": (), "table_spans": b"", "table_pages": b""}
    fields["num_decodes"] = batch
    return BatchPlan(
        step=1,
        rows=pack_ids(np.arange(batch)),
        starts=pack_ids(np.full(batch, context - 1)),
        input_ids=pack_ids(ids),
        **(fields | changes),
    )
