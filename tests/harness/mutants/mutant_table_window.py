"""Planted mistakes in the release of pages that have left a row's attention window: see
tests.harness.mutants.mutant_table.
"""

from __future__ import annotations

from scheduler_proc.cache.attention_window import AttentionWindow
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.pages.page_tables import PageTables
from tests.harness.mutants.mutant_table import Mutant

# A short window, so that it leaves many pages, and few pages, so that another row soon writes them.
WINDOWED = {
    "window": 7,
    "page_size": 4,
    "num_pages": 22,
    "max_rows": 8,
    "max_len": 88,
    "max_output": 60,
    "expiring": 0.0,
}
UNSHARED = WINDOWED | {"cache": "none"}
TIGHT = WINDOWED | {"capacity": "guaranteed_no_evict", "policy": "fcfs", "request_scheduler": ""}

WINDOW_MUTANTS = [
    Mutant(
        "a page given back while its last token is seen",
        AttentionWindow,
        "num_unseen",
        "self._num_tokens + 1",
        "self._num_tokens + 2",
        0,
        changes=WINDOWED,
    ),
    Mutant(
        "a page given back a page early",
        AttentionWindow,
        "num_unseen",
        "// self._page_size",
        "// self._page_size + 1",
        0,
        changes=WINDOWED,
    ),
    Mutant(
        "pages given back a page late",
        AttentionWindow,
        "num_unseen",
        "// self._page_size",
        "// self._page_size - 1",
        0,
        changes=WINDOWED,
    ),
    Mutant(
        "a prefix published without its head",
        KVCacheManager,
        "publish",
        "if self.num_gone_of[row]:",
        "if False:",
        0,
        changes=WINDOWED,
    ),
    Mutant(
        "pages given back twice at the end",
        PageTables,
        "private",
        "or self.num_gone_of[row]",
        "or 0",
        0,
        changes=UNSHARED,
    ),
    Mutant(
        "one page given back again and again",
        KVCacheManager,
        "give_back_unseen",
        "self.num_gone[rows[by_one]] += 1",
        "pass",
        0,
        changes=UNSHARED,
    ),
    Mutant(
        "the lease on a prefix that is seen no more kept",
        KVCacheManager,
        "_give_back",
        "self.cache.unlock(req.lease)",
        "pass",
        0,
        changes=WINDOWED,
    ),
    Mutant(
        "the lease given back with the prefix still in sight",
        KVCacheManager,
        "give_back_unseen",
        " & (unseen >= shared)",
        "",
        0,
        changes=WINDOWED,
    ),
    Mutant(
        "what the cache owns given back as the row's own",
        KVCacheManager,
        "_give_back",
        "num_shared or self.num_gone_of[row]",
        "self.num_gone_of[row]",
        0,
        changes=WINDOWED,
    ),
    Mutant(
        "given back in the middle of a prompt",
        KVCacheManager,
        "give_back_unseen",
        " & (kv_len >= self.rows.num_given[rows])",
        "",
        10,
        changes=WINDOWED,
    ),
    Mutant(
        "the pages of a window counted one short",
        AttentionWindow,
        "most_pages",
        "+ self.num_pages",
        "- 1",
        0,
        changes=TIGHT,
    ),
]
