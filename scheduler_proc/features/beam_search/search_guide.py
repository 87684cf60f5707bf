"""SearchGuide: ids that a guide allows next in each hypothesis of a beam search.

The grammar process has a matcher for each hypothesis. It gets the next beams and their tokens as soon as
these are chosen, and makes their masks while the model computes. The host applies the masks when candidates
are scored.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from runtime.wire.format import pack_ids
from runtime.wire.guide import Guide, MatcherState
from runtime.wire.hypotheses import FROM_THE_START, BranchMatchers, BranchStates
from scheduler_proc.core.request import Request
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.guided import CAUTION, no_backend


class SearchGuide:
    def __init__(self, req: Request, guide: Guide, client: GrammarClient) -> None:
        self.handle = req.handle
        self.tenant = req.tenant
        self.content = req.content
        self.guide = guide
        self.state: MatcherState | None = None
        """Mask and state for an empty output; None until the grammar process has answered."""
        self._req = req
        self._client = client
        self._stop_ids = np.array(sorted(req.stops.ids), np.intp)
        self._own_stop_ids = np.array(sorted(req.sampling.stop_token_ids), np.intp)
        """Stop ids that the request itself names, which the guide may also know as text."""
        self._min_tokens = req.sampling.min_tokens
        self._num_tokens = 0
        self._num_beams = 1
        self._awaited_from = 0
        """Number of output tokens from which on others wait for its masks."""
        self._branches: BranchStates | None = None
        client.open_search(self)

    @property
    def output_ids(self) -> bytes:
        """Return nothing, because the matcher stays at the start."""
        return b""

    @property
    def is_current(self) -> bool:
        """True if the masks for all current hypotheses are there."""
        if not self._num_tokens:
            return self.state is not None
        return self._branches is not None and self._branches.num_tokens == self._num_tokens

    def is_known(self) -> bool:
        """True if `is_current`, after reading what the grammar process has sent."""
        if not self.is_current:
            self._client.look()
        return self.is_current

    @property
    def is_awaited(self) -> bool:
        """True if others wait for the masks of the current hypotheses: none were late lately."""
        return self._num_tokens >= self._awaited_from

    def wait(self) -> bool:
        """Wait briefly for the masks of the current hypotheses. Returns False if they are late."""
        is_there = self._client.wait_for(self)
        if not is_there:
            self._awaited_from = self._num_tokens + CAUTION
        return is_there

    def begin_again(self) -> None:
        self.state = None

    def begin(self) -> None:
        """Begin with an empty output."""
        self._num_tokens, self._num_beams, self._branches = 0, 1, None
        self._awaited_from = 0

    def follow(self, beams: Sequence[tuple[int, int]]) -> None:
        """Continue with the next beams, each given as (index of the current beam, token)."""
        is_first = not self._num_tokens
        self._num_tokens += 1
        self._num_beams = len(beams)
        self._branches = None
        entries = [(FROM_THE_START if is_first else parent, pack_ids([token])) for parent, token in beams]
        self._client.branch(BranchMatchers(self.handle, self._num_tokens, tuple(entries)))

    def all_branches(self) -> BranchMatchers | None:
        group = self._req.group
        if group is None or not group.beams:  # it waits for rows, to begin again
            self.begin()
        if not self._num_tokens or group is None:
            return None
        each = [
            (FROM_THE_START, beam.tokens[beam.num_prompt :].tobytes())
            for beam in group.beams[: self._num_beams]
        ]
        return BranchMatchers(self.handle, self._num_tokens, tuple(each))

    def take(self, states: BranchStates) -> None:
        if states.num_tokens == self._num_tokens:
            self._branches = states

    def is_over(self, beam: int) -> bool:
        """Return True if the beam's output is complete and nothing may follow it, not even a stop id, because
        there is none.
        """
        if len(self._stop_ids):
            return False
        mask, is_complete = self._of(beam)
        return is_complete and not np.frombuffer(mask, np.uint8).any()

    def _of(self, beam: int) -> tuple[bytes | memoryview, bool]:
        """Return the mask of the beam's next token, and True if its output is complete."""
        if not self._num_tokens:
            assert self.state is not None
            return self._client.bits_of(self.state.masks[0]), self.state.are_complete[0]
        assert self._branches is not None
        return self._branches.masks[beam], self._branches.are_complete[beam]

    def allowed(self, beam: int, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the ids that may come next in a beam: those that the guide allows, and stop ids
        where it may end. Below the minimum length it may end only where nothing can follow.
        """
        mask, is_complete = self._of(beam)
        allowed = np.zeros(vocab_size, np.bool_)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size]
        allowed[: len(bits)] = bits
        is_young = self._num_tokens < self._min_tokens
        if is_complete and not (is_young and allowed.any()):
            allowed[self._stop_ids] = True
            return allowed
        no_text = self._stop_ids if is_young else self._own_stop_ids
        if len(no_text):
            text = allowed.copy()
            text[no_text] = False
            allowed = text if text.any() else allowed
        return allowed

    def close(self) -> None:
        self._client.close(self.handle)


def guide_of(req: Request, client: GrammarClient | None) -> SearchGuide | None:
    """Return the guide of a search, or None if it has none. client: None where no guides are served. Raises
    InvalidRequest.
    """
    guide = req.guide
    if guide is None:
        return None
    if client is None:
        raise no_backend(guide)
    return SearchGuide(req, guide, client)
