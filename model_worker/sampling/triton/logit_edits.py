"""Edits of logits before a draw (penalties, logit bias, masks, minimum length), and counts of drawn tokens.

    grid   row × block of the vocabulary          `_penalize`
    grid   masked row × block of the vocabulary   `_forbid_masked`
    grid   row                                    `_count`, `_add_listed`

Except for masks, which come with a step, each program reads its row's parameters and skips a row that has
none. So a launch serves any batch, and the host sends no list of rows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite
from model_worker.sampling.columns import IN_PROMPT as IN_PROMPT_COUNT
from model_worker.sampling.columns import SamplingColumns

BLOCK = 2048
LIST_BLOCK = 128
IN_PROMPT: tl.constexpr = tl.constexpr(IN_PROMPT_COUNT)


def penalize(logits: Tensor, rows: Tensor, counts: Tensor, columns: SamplingColumns) -> None:
    """Apply penalties in place, as TorchSampling does: logits [S, V] float32 contiguous, rows [S] int64,
    counts [max_rows, V] int32. Reads counts, and reads and writes logits whose count is not zero.
    """
    num_rows, vocab_size = logits.shape
    if num_rows:
        repetition, presence, frequency = columns.repetition, columns.presence, columns.frequency
        _sites().penalize.launch(
            (num_rows, triton.cdiv(vocab_size, BLOCK), 1), logits, rows, counts, repetition, presence,
            frequency, vocab_size, repetition.stride(0),
        )  # fmt: skip


def count_tokens(counts: Tensor, rows: Tensor, tokens: Tensor, columns: SamplingColumns) -> None:
    """Count the tokens [S] int64 of those rows [S] that have a penalty."""
    if len(rows):
        repetition, presence, frequency = columns.repetition, columns.presence, columns.frequency
        _sites().count_tokens.launch(
            (len(rows), 1, 1), counts, rows, tokens, repetition, presence, frequency, counts.shape[1],
            repetition.stride(0),
        )  # fmt: skip


def add_bias(logits: Tensor, rows: Tensor, table: Tensor) -> None:
    """Add biases to logits [S, V] of rows [S], in place. table [max_rows, 2, width] int32: ids (below 0:
    none), and the bits of float32 values. No id occurs twice in a row.
    """
    if len(rows):
        _sites().add_bias.launch(
            (len(rows), 1, 1), logits, rows, table, rows, table, logits.shape[1], table.stride(0), 0,
            table.shape[2],
        )  # fmt: skip


def forbid_masked(logits: Tensor, at: Tensor, words: Tensor) -> None:
    """Apply masks in place, as apply_masks does: logits [S, V] float32 contiguous, at [m] int32, words [m,
    ceil(V / 32)] int32 contiguous. Reads the words, and writes where an id is forbidden.
    """
    num_rows, num_words = words.shape
    vocab_size = logits.shape[1]
    grid = (num_rows, triton.cdiv(vocab_size, BLOCK), 1)
    _sites().forbid_masked.launch(grid, logits, at, words, vocab_size, num_words)


def forbid_below(logits: Tensor, rows: Tensor, positions: Tensor, table: Tensor, min_len: Tensor) -> None:
    """Set logits [S, V] of rows [S] to -inf, in place, at the ids of table [max_rows, 1, width] int32 (below
    0: none) where positions [S] < min_len [max_rows] of the row; all int64, min_len of any stride.
    """
    if len(rows):
        _sites().forbid_below.launch(
            (len(rows), 1, 1), logits, rows, table, positions, min_len, logits.shape[1], table.stride(0),
            min_len.stride(0), table.shape[2],
        )  # fmt: skip


class _Sites(NamedTuple):
    penalize: CallSite
    count_tokens: CallSite
    add_bias: CallSite
    forbid_masked: CallSite
    forbid_below: CallSite


@cache
def _sites() -> _Sites:
    return _Sites(
        penalize=CallSite(_penalize, BLOCK=BLOCK, num_warps=4),
        count_tokens=CallSite(_count, num_warps=1),
        add_bias=CallSite(_add_listed, FORBIDS=False, BLOCK=LIST_BLOCK, num_warps=1),
        forbid_masked=CallSite(_forbid_masked, BLOCK=BLOCK, num_warps=4),
        forbid_below=CallSite(_add_listed, FORBIDS=True, BLOCK=LIST_BLOCK, num_warps=1),
    )


@triton.jit
def _penalties(row, repetitions, presences, frequencies, column_stride):
    """Return (repetition, presence, frequency, True if one of them has an effect)."""
    repetition = tl.load(repetitions + row * column_stride)
    presence = tl.load(presences + row * column_stride)
    frequency = tl.load(frequencies + row * column_stride)
    return repetition, presence, frequency, (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit
def _penalize(
    logits, rows, counts, repetitions, presences, frequencies, vocab_size, column_stride, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    repetition, presence, frequency, is_penalised = _penalties(
        row, repetitions, presences, frequencies, column_stride
    )
    if is_penalised:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(counts + row * vocab_size + token, mask=token < vocab_size, other=0)
        seen = count != 0
        x = tl.load(logits + i * vocab_size + token, mask=seen, other=0.0)
        x = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
        times = (count & (IN_PROMPT - 1)).to(tl.float32)
        x -= frequency * times
        x -= tl.where(times > 0, presence, 0.0)
        tl.store(logits + i * vocab_size + token, x, mask=seen)


@triton.jit(do_not_specialize_on_alignment=["at"])
def _forbid_masked(logits, at, words, vocab_size, num_words, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(at + i).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + i * num_words + token // 32, mask=token < vocab_size, other=-1)
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * vocab_size + token, float("-inf"), mask=is_forbidden)


@triton.jit
def _count(
    counts, rows, tokens, repetitions, presences, frequencies, vocab_size, column_stride
):  # fmt: skip
    row = tl.load(rows + tl.program_id(0))
    _, _, _, is_penalised = _penalties(row, repetitions, presences, frequencies, column_stride)
    if is_penalised:
        place = counts + row * vocab_size + tl.load(tokens + tl.program_id(0))
        tl.store(place, tl.load(place) + 1)


@triton.jit(do_not_specialize=["table_stride", "width"])  # a table grows with its longest list
def _add_listed(
    logits, rows, table, positions, min_lens, vocab_size, table_stride, column_stride, width,
    FORBIDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    if FORBIDS:
        is_long = tl.load(positions + i) >= tl.load(min_lens + row * column_stride)
        width = tl.where(is_long, 0, width)
    for start in range(0, width, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        place = table + row * table_stride + entry
        token = tl.load(place, mask=entry < width, other=-1)
        at = logits + i * vocab_size + token
        if FORBIDS:
            tl.store(at, float("-inf"), mask=token >= 0)
        else:
            value = tl.load(place + width, mask=token >= 0, other=0).to(tl.float32, bitcast=True)
            tl.store(at, tl.load(at, mask=token >= 0, other=0.0) + value, mask=token >= 0)
