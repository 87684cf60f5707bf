"""Guided: keeps the output of a sequence to its guide, token by token.

It waits for its guide before it gets a row. From then on each token has a mask, made by the grammar process
while the model computes; a mask that is late costs the sequence its row until it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.base.errors import InvalidRequest, RequestError
from runtime.wire.guide import Guide
from runtime.wire.messages import MatcherState
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import NoMask, ScheduledRow
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.features.grammar_client import GrammarClient

BitArray: TypeAlias = npt.NDArray[np.uint8]
WORD_BYTES = 4


class Guided(RequestFeature):
    """Feature that keeps output to a guide. It must come before every feature that adds guesses: of a row
    with a mask there are none.
    """

    def __init__(self, req: Request, guide: Guide, client: GrammarClient) -> None:
        self.handle = req.handle
        self.guide = guide
        self.state: MatcherState | None = None
        self._req = req
        self._client = client
        allowed = req.sampling.allowed_token_ids
        self._allowed = bits_of(allowed) if allowed else None
        self._stops = bits_of(req.stops.ids)
        self._own_stops = bits_of(req.sampling.stop_token_ids)
        """Those that a guide may know as text; end tokens it does not."""
        self._is_plain = self._allowed is None and not len(self._own_stops)
        client.open(self)

    @property
    def output_ids(self) -> bytes:
        return self._req.tokens[self._req.num_prompt :].tobytes()

    @property
    def is_current(self) -> bool:
        return self.state is not None and self.state.num_tokens == self._req.num_output

    @property
    def awaited(self) -> str:
        return "" if self.is_current else "guide"

    def ready(self) -> bool:
        if not self.is_current:
            self._client.look()
        return self.is_current

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        row.make_mask = self._mask

    def accept(self, sampled: Sampled) -> list[int]:
        req, ids = self._req, sampled.ids
        num_tokens = req.num_tokens + len(ids)
        is_over = num_tokens >= req.max_len or req.stops_at(ids[-1], num_tokens - 1)
        if not is_over:  # a stop id is no text of the guide's
            self._client.advance(self.handle, num_tokens - req.num_prompt, ids)
        return ids

    def release(self) -> None:
        self._client.close(self.handle)

    def _mask(self) -> bytes | int | NoMask:
        """Allow what the guide does, and stop ids where the output may end: a mask, or the slot in which it
        lies. Raises RequestError when that is nothing, but for an output that is complete.
        """
        if not self._client.wait_for(self):
            return NoMask.LATE
        state, req = self.state, self._req
        assert state is not None
        may_stop = state.is_complete and req.num_tokens >= req.min_len
        if self._is_plain and not may_stop and state.mask != b"":
            return state.mask
        mask = np.frombuffer(self._client.bits_of(state), np.uint8)
        stops = self._stops if may_stop else self._stops[:0]
        if self._allowed is not None:
            mask, stops = _both(mask, self._allowed), _both(stops, self._allowed)
        if not may_stop:
            text = _without(mask, self._own_stops)
            mask = text if text.any() else mask
        if not mask.any():
            if state.is_complete:
                return NoMask.COMPLETE
            raise RequestError(
                "no token that the guide allows next is left by allowed_token_ids, or is in the vocabulary",
                code="grammar_unsatisfiable",
                status=400,
            )
        return self._client.put(state, _either(mask, stops).tobytes())


def bits_of(ids: Collection[int]) -> BitArray:
    """Return the bitmask of some ids, in whole words."""
    num_bits = 8 * WORD_BYTES * (max(ids, default=-1) // (8 * WORD_BYTES) + 1)
    bits = np.zeros(num_bits, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little")


def _both(one: BitArray, other: BitArray) -> BitArray:
    size = min(len(one), len(other))
    return one[:size] & other[:size]


def _without(one: BitArray, other: BitArray) -> BitArray:
    made = one.copy()
    size = min(len(one), len(other))
    made[:size] &= ~other[:size]
    return made


def _either(one: BitArray, other: BitArray) -> BitArray:
    made = np.zeros(max(len(one), len(other)), np.uint8)
    made[: len(one)] = one
    made[: len(other)] |= other
    return made


def no_backend(guide: Guide) -> InvalidRequest:
    """Return the refusal of a launch that keeps no guides."""
    return InvalidRequest(
        f"{guide.kind}: this server keeps no guides (--grammar-backend none)",
        param=guide.kind,
        code="unsupported_parameter",
    )


def attach_guide(client: GrammarClient | None) -> Callable[[Request], RequestFeature | None]:
    """A factory for the intake: gives Guided to each request with a guide. None: there is no backend."""

    def attach(req: Request) -> RequestFeature | None:
        if req.guide is None or req.group is not None:  # a search keeps to its guide itself
            return None
        if client is None:
            raise no_backend(req.guide)
        return Guided(req, req.guide, client)

    return attach
