"""Guided: makes the output of a sequence keep to its guide, token by token.

The sequence waits for its guide before it gets a row. Then each of its tokens is sampled with a mask that the
grammar process makes while the model computes. If a mask is late, the sequence sits out until the mask is
there, and for some tokens more it takes part in a step only with a mask that is there already. A row with
guesses has a mask for each position at which one of its tokens may be sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.base.errors import InvalidRequest, RequestError
from runtime.wire.format import pack_ids
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import NoMask, ScheduledRow
from scheduler_proc.features.base import RequestFeature
from scheduler_proc.features.grammar_client import GrammarClient

BitArray: TypeAlias = npt.NDArray[np.uint8]
WORD_BYTES = 4
PAUSE = 64
"""Number of tokens for which a sequence makes no guesses after masks behind guesses were late."""
CAUTION = 32
"""Number of tokens after any other late mask for which no step waits for masks of the sequence. After a
pause of guesses there are as many for which no step waits for masks behind guesses.
"""


class Guided(RequestFeature):
    """Makes the output keep to a guide. It must come before every feature that adds guesses: its `accept`
    decides which ids of a step the others see.
    """

    def __init__(self, req: Request, guide: Guide, client: GrammarClient) -> None:
        self.handle = req.handle
        self.tenant = req.tenant
        self.content = req.content
        self.guide = guide
        self.state: MatcherState | None = None
        self._req = req
        self._client = client
        allowed = req.sampling.allowed_token_ids
        self._allowed = bits_of(allowed) if allowed else None
        self._stops = bits_of(req.stops.ids)
        self._own_stops = bits_of(req.sampling.stop_token_ids)
        """Bitmask of the request's own stop ids. The guide may know these as text; it does not know end
        tokens.
        """
        self._is_plain = self._allowed is None and not len(self._own_stops)
        self._told = b""
        """Packed guesses that were sent to the grammar process last, behind the current output."""
        self._num_masked = 1
        """Number of tokens of the step in flight that were sampled with a mask."""
        self._guesses_from = 0
        """Number of tokens, prompt included, from which on it may have guesses."""
        self._trusted_from = 0
        """The same from which on a step waits for the masks of its guesses."""
        self._overlaps_from = 0
        """The same from which on it is planned before its mask is there."""
        client.open(self)

    @property
    def output_ids(self) -> bytes:
        return self._req.tokens[self._req.num_prompt :].tobytes()

    @property
    def is_current(self) -> bool:
        return self.state is not None and self._is_of_now(self.state)

    @property
    def awaited(self) -> str:
        return "" if self.is_current else "guide"

    def ready(self) -> bool:
        if not self.is_current:
            self._client.look()
        return self.is_current

    def begin_again(self) -> None:
        self.state, self._told = None, b""

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        row.make_masks = self._masks
        row.masked_by = self
        num_tokens = self._req.num_tokens
        row.sits_out = num_tokens < self._overlaps_from
        if num_tokens >= self._guesses_from:
            row.note_guesses = self._tell
            row.is_on_trial = row.sits_out or num_tokens < self._trusted_from

    def accept(self, sampled: Sampled) -> list[int]:
        req, ids = self._req, sampled.ids
        # Tokens after the last mask, where the output is complete or cannot go on, were drawn without one.
        ids = ids if len(ids) <= self._num_masked else ids[: self._num_masked]
        num_tokens = req.num_tokens + len(ids)
        is_over = num_tokens >= req.max_len or req.stops_at(ids[-1], num_tokens - 1)
        if not is_over:  # a stop id is no text of the guide
            self._told = b""
            self._client.advance(MatcherNews(self.handle, num_tokens - req.num_prompt, pack_ids(ids)))
        return ids

    def release(self) -> None:
        self._client.close(self.handle)

    def _is_of_now(self, state: MatcherState) -> bool:
        """Return True if an answer covers all of the output and the guesses sent last. Its masks are then not
        about to be overwritten.
        """
        return state.num_tokens == self._req.num_output and state.guesses == self._told

    def _tell(self, guesses: Sequence[int]) -> None:
        """Ask for the masks behind these guesses, unless they were asked for already."""
        told = pack_ids(guesses)
        if told != self._told:
            self._told = told
            self._client.advance(MatcherNews(self.handle, self._req.num_output, guesses=told))

    def _masks(self, num_guesses: int) -> list[bytes | int] | NoMask:
        """Return the masks of the row's positions, or the slots that hold them, or why there are none. Raises
        RequestError if no token may come next although the output is not complete.
        """
        is_there = self._client.wait_for(self)
        state = self.state
        if not is_there or state is None or (num_guesses and state.is_short):
            if num_guesses:
                self._guesses_from = self._req.num_tokens + PAUSE
                self._trusted_from = self._guesses_from + CAUTION
            else:
                self._overlaps_from = self._req.num_tokens + CAUTION
            return NoMask.LATE
        masks: list[bytes | int] = []
        for mask, is_complete in islice(zip(state.masks, state.are_complete, strict=True), num_guesses + 1):
            allowed = self._allowed_of(mask, is_complete, self._req.num_tokens + len(masks))
            if allowed == b"":
                break
            masks.append(allowed)
        self._num_masked = len(masks)
        if masks:
            return masks
        if state.are_complete[0]:
            return NoMask.COMPLETE
        raise RequestError(
            "no token that the guide allows next is left by allowed_token_ids, or is in the vocabulary",
            code="grammar_unsatisfiable",
            status=400,
        )

    def _allowed_of(self, allowed: bytes | int, is_complete: bool, position: int) -> bytes | int:
        """Return the mask for a position: what the guide allows, and stop ids where the output may end.
        Returns b"" if nothing is allowed.
        """
        may_stop = is_complete and position >= self._req.min_len
        if self._is_plain and not may_stop and allowed != b"":
            return allowed
        mask = np.frombuffer(self._client.bits_of(allowed), np.uint8)
        stops = self._stops if may_stop else self._stops[:0]
        if self._allowed is not None:
            mask, stops = _both(mask, self._allowed), _both(stops, self._allowed)
        if not may_stop:
            text = _without(mask, self._own_stops)
            mask = text if text.any() else mask
        if not mask.any():
            return b""
        return self._client.put(allowed, _either(mask, stops).tobytes())


def bits_of(ids: Collection[int]) -> BitArray:
    """Return the bitmask of these ids, in whole words."""
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
    """Return the error for a guide in a launch that serves none."""
    return InvalidRequest(
        f"{guide.kind}: this server keeps no guides (--grammar-backend none)",
        param=guide.kind,
        code="unsupported_parameter",
    )


def attach_guide(client: GrammarClient | None) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives Guided to each request with a guide. client None: such requests are
    refused.
    """

    def attach(req: Request) -> RequestFeature | None:
        if req.guide is None or req.group is not None:  # a beam search follows its guide itself
            return None
        if client is None:
            raise no_backend(req.guide)
        return Guided(req, req.guide, client)

    return attach
