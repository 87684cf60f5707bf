"""Plans for the warm-up, which a runner computes before it serves, so that everything is loaded and compiled
at the first request, and the memory of the largest step is known. A row with an empty page table has the
dummy page everywhere, so a context of any length takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from model_worker.memory.kv_pool import DUMMY_PAGE
from runtime.sampling.columns import examples
from runtime.sampling.features import EDITS, LOGPROBS, TOP_P, TOP_P_DECAY, TRUNCATES
from runtime.wire.format import RowMasks, pack_ids, unpack_ids
from runtime.wire.plan import BatchPlan, RowSetup
from runtime.wire.sampling_params import SamplingParams

PROMPT_TOKENS = 8
ALL_ALLOWED = 0xFF
FIRST_SLOT = 0
"""Adapter slot of all rows of the warm-up. It is empty, but in a model that takes adapters these rows launch
what rows with an adapter do.
"""


def first_prompt(max_len: int, num_pages: int, page_size: int) -> BatchPlan:
    """Return a plan with a prompt of row 0, with pages for it and for the token after it."""
    length = min(PROMPT_TOKENS, max_len - 1, num_pages * page_size - 1)
    pages = np.arange(1, -(-(length + 1) // page_size) + 1)
    plan = chunks([length])
    return replace(plan, table_spans=pack_ids([0, 0, len(pages)]), table_pages=pack_ids(pages))


def decode_behind(prompt: BatchPlan) -> BatchPlan:
    """Return a plan with the token after the first row of a plan of prompts."""
    return decode_after(unpack_ids(prompt.lens).item(0))


def decode_after(position: int) -> BatchPlan:
    """Return a plan with the token of row 0 at that position, whose id only the device knows."""
    return BatchPlan(
        step=1,
        setups=(RowSetup.of(0, position, SamplingParams(temperature=0.0), adapter_slot=FIRST_SLOT),),
        page_copies=(),
        table_spans=b"",
        table_pages=b"",
        num_decodes=1,
        rows=pack_ids([0]),
        starts=pack_ids([position]),
        input_ids=pack_ids([-1]),
    )


def longest_decode(max_len: int, page_size: int) -> BatchPlan:
    """Return a plan with the last token of the longest possible context."""
    num_pages = -(-max_len // page_size)
    on_dummy_page = {
        "table_spans": pack_ids([0, 0, num_pages]),
        "table_pages": pack_ids([DUMMY_PAGE] * num_pages),
    }
    return replace(decode_after(max_len - 1), **on_dummy_page)


def edited_decodes(decode: BatchPlan, vocab_size: int) -> Iterator[tuple[BatchPlan, RowMasks]]:
    """Yield decodes of row 0 that together launch everything in a sampler that is not recorded, with the
    masks of each.
    """
    position = unpack_ids(decode.starts).item()
    edited = RowSetup.of(
        0,
        position,
        SamplingParams(**examples(EDITS | LOGPROBS), min_tokens=1),
        pack_ids([0] * position),
        min_len=position + 2,
        stop_ids=[0],
        adapter_slot=FIRST_SLOT,
    )
    yield replace(decode, setups=(edited,)), {}
    sampling = SamplingParams(**examples(TOP_P | TOP_P_DECAY))
    decaying = RowSetup.of(0, position, sampling, adapter_slot=FIRST_SLOT)
    yield replace(decode, setups=(decaying,)), {0: [bytes([ALL_ALLOWED]) * -(-vocab_size // 8)]}


def ever_smaller_chunks(num_tokens: int, num_rows: int, max_len: int) -> Iterator[BatchPlan]:
    """Yield prompts of num_tokens tokens in num_rows rows, then of half as many, and so on, because kernels
    may depend on these numbers. The largest comes first, so that the others reuse its memory.
    """
    num_tokens = min(num_tokens, num_rows * (max_len - 1))
    while num_tokens > PROMPT_TOKENS:
        n = min(num_rows, num_tokens)
        yield chunks([num_tokens // n + (i < num_tokens % n) for i in range(n)])
        num_tokens //= 2


def chunks(lens: list[int]) -> BatchPlan:
    """Return a plan with prompts of rows 0, 1, ... whose next tokens are drawn in the most expensive way."""
    num_rows = len(lens)
    cut = SamplingParams(**examples(TRUNCATES))
    return BatchPlan(
        step=0,
        setups=tuple(RowSetup.of(row, n, cut, adapter_slot=FIRST_SLOT) for row, n in enumerate(lens)),
        page_copies=(),
        table_spans=b"",
        table_pages=b"",
        num_decodes=0,
        rows=pack_ids(range(num_rows)),
        starts=pack_ids([0] * num_rows),
        input_ids=pack_ids([0] * sum(lens)),
        lens=pack_ids(lens),
        samples=pack_ids([1] * num_rows),
        drafts=pack_ids([0] * num_rows),
    )
