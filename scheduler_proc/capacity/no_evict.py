"""GUARANTEED_NO_EVICT and STATIC_BATCH: capacity policies that never retract; a running request keeps its row
until its end.

Admission computes the most pages that the running requests and the newcomer can ever hold together
(`Outlook`). That bound assumes that all advance at the same pace. A long prefill, a spent budget or rejected
guesses let some fall behind, and then pages could become so short that none can continue. So growth is
guarded as well: a row takes pages only if the requests could afterwards still end one after the other. A row
that has to wait for pages is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.wire.format import IntArray
from scheduler_proc.cache.kv_cache_manager import KVCacheManager, Prefix
from scheduler_proc.core.request import Request
from scheduler_proc.core.row_columns import RowArray

PagesToCome: TypeAlias = npt.NDArray[np.int64]


class Outlook:
    """Pages that some requests hold now and can come to hold: one entry each.

        pages    | shared: the cache's | private |   still to come   |
                 |------- final: at its last token, or before -------|

    Pages that have left the attention window are not counted (`KVCacheManager.give_back_unseen`). A page that
    several requests share counts for the last of them to end only, since it stays until then.
    """

    def __init__(
        self, kv: KVCacheManager, newcomer: Request | None = None, prefix: Prefix | None = None
    ) -> None:
        """Take the state of all running requests, and of a newcomer whose prefix is locked, as if all its
        tokens were computed.
        """
        rows, held, page_size = kv.rows, kv.rows.running, kv.page_size
        self._kv = kv
        self._leases = [req.lease for req in rows.holders()]
        self.shared: PagesToCome = kv.num_shared[held].astype(np.int64)
        self.private: PagesToCome = kv.num_held(held) - self.shared
        num_tokens, max_len = rows.num_tokens[held], rows.max_len[held]
        final = kv.most_pages(held, max_len)
        num_skipped = self.shared + kv.num_gone[held]
        if newcomer is not None and prefix is not None:
            num_pages = kv.num_pages_for(newcomer.num_tokens)
            self._leases.append(prefix.node)
            self.shared = np.append(self.shared, prefix.num_pages)
            self.private = np.append(self.private, num_pages - prefix.num_pages)
            num_tokens = np.append(num_tokens, newcomer.num_tokens)
            max_len = np.append(max_len, newcomer.max_len)
            final = np.append(final, kv.most_pages_of(newcomer.num_tokens, newcomer.max_len))
            num_skipped = np.append(num_skipped, prefix.num_pages)
        self.own_tokens: PagesToCome = num_tokens - num_skipped * page_size
        self.tokens_left: PagesToCome = (max_len - num_tokens).astype(np.int64)
        self.final: PagesToCome = final.astype(np.int64)

    def _cumulated_shared(self, order: RowArray) -> PagesToCome:
        """Return [n] the number of distinct shared pages of the first 1, 2, ... n requests in this order."""
        return np.cumsum(self._kv.cache.num_pages_held([self._leases[i] for i in order.tolist()]))

    def final_pages(self) -> int:
        """Return how many pages the requests hold if all reach their last token at the same time."""
        num_shared = sum(self._kv.cache.num_pages_held(self._leases))
        return int((self.final - self.shared).sum()) + num_shared

    def peak_pages(self) -> int:
        """Return the most pages held at any time if each request takes one token a step, and gives everything
        back at its end.

        With the most tokens left first, when the i-th ends the first i of them hold the tokens that they have
        now and i times the tokens that the i-th has left. The peak is the largest of these sums.
        """
        order = np.argsort(-self.tokens_left)
        count = np.arange(1, len(order) + 1)
        # In the worst case the last page of each has a single token.
        until = self.tokens_left[order] + self._kv.page_size - 1
        if self._kv.window is None:
            tokens = np.cumsum(self.own_tokens[order]) + count * until
        else:  # a request never holds more than its final pages
            limit = (self.final - self.shared)[order] * self._kv.page_size
            each = np.minimum(self.own_tokens[order] + until[:, None], limit)
            tokens = np.tril(each).sum(axis=1)
        pages = tokens // self._kv.page_size
        return int((pages + self._cumulated_shared(order)).max())

    def pages_in_turn(self) -> int:
        """Return the most pages held at any time if the requests end one after the other while the others
        stand still. The request that needs the fewest pages goes first, since it gives back what the next may
        need.
        """
        missing = np.maximum(self.final - self.shared - self.private, 0)
        order = np.argsort(-missing)  # the last to end first: when one ends, those before it run
        pages = np.cumsum(self.private[order]) + self._cumulated_shared(order) + missing[order]
        return int(pages.max())


class GuaranteedNoEvict:
    """Capacity policy under which a running request keeps its row until its end."""

    closes_batches = False
    guards_growth = True

    def __init__(self, kv: KVCacheManager) -> None:
        self._rows = kv.rows
        self._kv = kv
        self._final_pages = -1  # of running requests, shared pages once; -1: not counted in this step
        self._is_roomy = True  # all running requests could reach their last token at the same time
        self._slack = 0  # pages that may be taken before the running requests are checked again

    def admits(self) -> bool:
        self._final_pages = -1
        return True

    def try_promise(self, req: Request, prefix: Prefix, extra_pages: int) -> bool:
        kv, rows = self._kv, self._rows
        if self._final_pages < 0:
            self._final_pages = int(kv.most_pages(rows.running, rows.max_len[rows.running]).sum())
        own_final_pages = kv.most_pages_of(req.num_tokens, req.max_len)
        final_pages = self._final_pages + own_final_pages
        num_withheld = kv.guard.num_withheld(prefix.node, own_final_pages - prefix.num_pages)
        num_pages = kv.pages.num_pages - extra_pages - num_withheld
        # Alone, it may use everything: intake made sure that it never needs more.
        is_roomy = final_pages <= num_pages or not rows.num_running
        if not is_roomy:
            outlook = Outlook(kv, req, prefix)
            is_roomy = outlook.final_pages() <= num_pages
            if not is_roomy and max(outlook.peak_pages(), outlook.pages_in_turn()) > num_pages:
                return False
            self._slack = 0
        self._is_roomy = is_roomy
        self._final_pages = final_pages
        return True

    def note_seated(self, num_taken: int) -> None:
        """Do nothing: the rows already show it."""

    def may_grow(self, rows: RowArray | int, upto: IntArray | int) -> bool:
        if self._is_roomy:
            return True
        kv = self._kv
        growth = np.maximum(-(-upto // kv.page_size) - kv.num_pages[rows], 0)
        num_grown = int(growth.sum())
        if num_grown <= self._slack:
            self._slack -= num_grown
            return True
        outlook = Outlook(kv)
        if outlook.final_pages() <= kv.pages.num_pages:
            self._is_roomy = True
            return True
        grown = np.zeros(self._rows.max_rows, np.int64)
        grown[rows] = growth
        outlook.private += grown[self._rows.running]
        slack = kv.pages.num_pages - outlook.pages_in_turn()
        if slack < 0:
            return False
        self._slack = slack
        return True

    def victim(self, candidates: Sequence[Request]) -> Request | None:
        return None

    def rank(self, req: Request) -> tuple[int, int]:
        """Return the sort key of a running request: by urgency, then first come, first served."""
        return (-req.urgency, self._rows.stay_of[req.row])

    def note_step(self) -> None:
        """Do nothing: the policy does not depend on steps."""

    def note_idle(self) -> None:
        """Do nothing: the policy keeps no estimates."""

    def note_retraction(self) -> None:
        """Do nothing: the policy retracts no request."""


class StaticBatch(GuaranteedNoEvict):
    """GuaranteedNoEvict with closed batches: the next batch starts when the last request of the current one
    has ended.
    """

    closes_batches = True

    def admits(self) -> bool:
        self._final_pages = -1
        return not self._rows.num_running
