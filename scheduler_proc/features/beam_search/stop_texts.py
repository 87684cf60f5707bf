"""HypothesisText: incremental text of a hypothesis, kept as far as needed to detect stop strings.

The same decoders make the same text of the ids in the detokenizer, so the token that ends a hypothesis here
also ends its text there. Knows no row, no page and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.text.automaton import Automaton
from runtime.text.codec import Decoders, ForkingDecoder


class HypothesisText(NamedTuple):
    decoder: ForkingDecoder
    automaton: Automaton[str]
    """Automaton over the search's stop strings."""
    state: int = 0
    """State of the automaton at the end of the text."""

    @staticmethod
    def begin(
        stops: Sequence[str], prompt_tail: Sequence[int], decoders: Decoders, *, skip_special_tokens: bool
    ) -> HypothesisText:
        """Return the text state of an empty output. prompt_tail: the prompt's last ids, which decoding needs;
        their text cannot match a stop string.
        """
        decoder = decoders.open(prompt_tail, skip_special_tokens=skip_special_tokens)
        return HypothesisText(decoder, Automaton(stops))

    def after(self, token: int, *, may_match: bool) -> tuple[bool, HypothesisText]:
        """Return True if one more token completes a stop string, and the text state after it. With may_match
        False no stop string counts as complete yet, but one may begin. This object does not change.
        """
        decoder, automaton = self.decoder.fork(), self.automaton
        state, _, match_len = automaton.scan(self.state, decoder.push(token), until_match=may_match)
        return match_len > 0, HypothesisText(decoder, automaton, automaton.pending(state))
