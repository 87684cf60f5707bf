"""HypothesisText: the text of a hypothesis, as far as it takes to see in it where a stop string is complete.

The text is the one that the detokenizer makes of the same ids, by the same decoders: so what ends a
hypothesis here ends its text there, with the same token. Knows no row, no page and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.text.automaton import Automaton
from runtime.text.codec import Decoders, ForkingDecoder


class HypothesisText(NamedTuple):
    decoder: ForkingDecoder
    automaton: Automaton[str]
    """Automaton of the search's stop strings."""
    state: int = 0
    """State of the automaton at the end of the text."""

    @staticmethod
    def begin(
        stops: Sequence[str], prompt_tail: Sequence[int], decoders: Decoders, *, skip_special_tokens: bool
    ) -> HypothesisText:
        """Return the text of an output without tokens. `prompt_tail`: the prompt's last ids; none of their
        text counts.
        """
        decoder = decoders.open(prompt_tail, skip_special_tokens=skip_special_tokens)
        return HypothesisText(decoder, Automaton(stops))

    def after(self, token: int, *, may_match: bool) -> tuple[bool, HypothesisText]:
        """Tell whether a stop string is complete with one more token, and return the text then. With
        `may_match` False none is, though a later one may begin here. This text stays as it is.
        """
        decoder, automaton = self.decoder.fork(), self.automaton
        state, _, match_len = automaton.scan(self.state, decoder.push(token), until_match=may_match)
        return match_len > 0, HypothesisText(decoder, automaton, automaton.pending(state))
