"""Searches of a toy model, computed by hand: diversity, and widths that change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from scheduler_proc.features.beam_search.hypotheses import Continuation, Hypotheses, SearchSettings
from scheduler_proc.features.beam_search.score_rules import BeamTokens, NextTokens
from scheduler_proc.features.beam_search.stop_texts import HypothesisText

STOP = 9


class Letters:
    """Decoder of ids that stand for letters: 0 is a, 1 is b."""

    def open(self, prompt_tail: Sequence[int], *, skip_special_tokens: bool = True) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return ""

    def fork(self) -> Letters:
        return self

    def text_of(self, ids: Sequence[int]) -> str:
        return "".join(map(self.push, ids))


def text_for(*stops: str) -> HypothesisText:
    return HypothesisText.begin(stops, (), Letters(), skip_special_tokens=True)


def said(hypotheses: Hypotheses) -> list[tuple[list[int], bool]]:
    return [([link.token for link in each.path.from_the_first()], each.by_stop) for each in hypotheses.ended]


def next_tokens(logprobs: Mapping[int, float]) -> NextTokens:
    """Return tokens with these logprobs, the best first."""
    ids = np.array(sorted(logprobs, key=lambda token: -logprobs[token]), np.int32)
    values = np.array([logprobs[token] for token in ids.tolist()], np.float32)
    return NextTokens(ids, values, values)


def advance(hypotheses: Hypotheses, each: Sequence[NextTokens]) -> list[Continuation]:
    return hypotheses.advance(BeamTokens.joined(each[: hypotheses.num_beams]), len(each))


def search(width: int, max_output: int = 10, **settings: object) -> Hypotheses:
    return Hypotheses(SearchSettings(width, (STOP,), max_output, **settings))  # type: ignore[arg-type]


# Behind the first token the beams are 1 (-1.0) and 2 (-1.2). Then:
#   beam 0   5: -1.0 - 0.5 = -1.5   6: -1.0 - 0.6 = -1.6   7: -1.0 - 2.0 = -3.0
#   beam 1   5: -1.2 - 0.5 = -1.7   6: -1.2 - 0.9 = -2.1   7: -1.2 - 2.0 = -3.2
FIRST = {1: -1.0, 2: -1.2, 3: -3.0, 4: -4.0}
SECOND = [{5: -0.5, 6: -0.6, 7: -2.0}, {5: -0.5, 6: -0.9, 7: -2.0}]


@pytest.mark.parametrize(
    ("rate", "wanted", "sums"),
    [
        (0.0, [(0, 5), (0, 6)], [-1.5, -1.6]),
        # Beam 1 has half more: its best, -1.2, goes before that of beam 0, -1.5.
        (0.5, [(1, 5), (0, 5)], [-1.7, -1.5]),
        # Beam 1 has half less: none of it comes near.
        (-0.5, [(0, 5), (0, 6)], [-1.5, -1.6]),
    ],
)
def test_a_diversity_rate_prefers_lower_or_higher_beams_and_is_in_no_score(
    rate: float, wanted: list[tuple[int, int]], sums: list[float]
) -> None:
    hypotheses = search(2, max_output=3, diversity=rate, length_penalty=0.0)
    assert advance(hypotheses, [next_tokens(FIRST)]) == [(0, 1), (0, 2)]
    assert advance(hypotheses, [next_tokens(each) for each in SECOND]) == wanted
    assert advance(hypotheses, [next_tokens({8: 0.0}), next_tokens({8: 0.0})]) == []
    assert [each.score for each in hypotheses.ended] == pytest.approx(sorted(sums, reverse=True))


def test_a_negative_rate_keeps_a_search_with_its_best_beam() -> None:
    """Without it the second beam wins a place: -1.2 - 0.1 = -1.3 against -1.6 of the first one's second."""
    for rate, wanted in ((0.0, [(1, 5), (0, 5)]), (-0.5, [(0, 5), (0, 6)])):
        hypotheses = search(2, diversity=rate)
        advance(hypotheses, [next_tokens(FIRST)])
        second = [SECOND[0], {5: -0.1, 6: -3.0, 7: -3.0}]
        assert advance(hypotheses, [next_tokens(each) for each in second]) == wanted


def test_a_width_array_says_how_many_beams_go_on_from_each_token() -> None:
    hypotheses = search(8, widths=(2, 4, 8))
    uniform = next_tokens({token: -2.0 - token / 100 for token in range(20) if token != STOP})
    counts, beams = [], [Continuation(0, 0)]
    for _ in range(5):
        beams = advance(hypotheses, [uniform] * len(beams))
        counts.append(len(beams))
    assert counts == [2, 4, 8, 8, 8]


def test_where_it_narrows_rows_go_on_for_nothing() -> None:
    hypotheses = search(4, widths=(4, 2))
    uniform = next_tokens({token: -2.0 - token / 100 for token in range(20) if token != STOP})
    advance(hypotheses, [uniform])
    for _ in range(2):
        beams = advance(hypotheses, [uniform] * 4)
        assert len(beams) == 4
        assert hypotheses.num_beams == 2
        assert len(set(beams[:2])) == 2
        assert beams[2:] == [beams[0]] * 2


def test_a_search_with_fewer_tokens_than_beams_goes_on_with_those() -> None:
    hypotheses = search(4, max_output=2, length_penalty=0.0)
    assert advance(hypotheses, [next_tokens({1: -1.0, 2: -2.0})]) == [(0, 1), (0, 2)]
    assert advance(hypotheses, [next_tokens({5: -1.0}), next_tokens({})]) == []
    assert [each.score for each in hypotheses.ended] == [-2.0]


def test_a_stop_word_ends_a_hypothesis_as_a_stop_id_does() -> None:
    hypotheses = search(2, max_output=9, length_penalty=0.0, stop_words=((1, 5), (6, 6)), min_output=1)
    assert advance(hypotheses, [next_tokens({**FIRST, 6: -0.9})]) == [(0, 6), (0, 1)]
    # (6, 6) and (1, 5) end, both among the first two, and nothing that runs comes near.
    second = [next_tokens({6: -0.1, 5: -2.0, 7: -3.0}), next_tokens({5: -0.1, 6: -2.5, 7: -3.0})]
    assert advance(hypotheses, second) == []
    assert said(hypotheses) == [([6, 6], True), ([1, 5], True)]


def test_no_stop_word_ends_a_hypothesis_before_its_least_tokens() -> None:
    hypotheses = search(2, stop_words=((1,), (2, 5)), min_output=3)
    assert advance(hypotheses, [next_tokens(FIRST)]) == [(0, 1), (0, 2)]
    assert advance(hypotheses, [next_tokens(each) for each in SECOND]) == [(0, 5), (0, 6)]
    assert hypotheses.ended == []


def test_a_stop_string_ends_a_hypothesis_in_whose_text_it_is_complete() -> None:
    """Each hypothesis has its own text: "bf" comes of 1 then 5, and not of 6 then 5."""
    hypotheses = search(2, max_output=9, length_penalty=0.0, text=text_for("bf", "gg"))
    assert advance(hypotheses, [next_tokens({**FIRST, 6: -0.9})]) == [(0, 6), (0, 1)]
    second = [next_tokens({5: -0.1, 6: -0.3, 7: -3.0}), next_tokens({6: -0.1, 5: -2.0, 7: -3.0})]
    # The first two are 6 5, which goes on, and 1 6, which does, too.
    assert advance(hypotheses, second) == [(0, 5), (1, 6)]
    assert hypotheses.ended == []
    hypotheses = search(2, max_output=9, length_penalty=0.0, text=text_for("bf", "gg"))
    advance(hypotheses, [next_tokens({**FIRST, 6: -0.9})])
    assert advance(hypotheses, [next_tokens({6: -0.1, 7: -9.0}), next_tokens({5: -0.1, 7: -9.0})]) == []
    assert said(hypotheses) == [([6, 6], True), ([1, 5], True)]


def test_no_stop_string_ends_a_hypothesis_before_its_least_tokens() -> None:
    hypotheses = search(2, max_output=9, text=text_for("b", "cf"), min_output=2)
    assert advance(hypotheses, [next_tokens(FIRST)]) == [(0, 1), (0, 2)]
    assert advance(hypotheses, [next_tokens(each) for each in SECOND]) == [(0, 5), (0, 6)]
    assert hypotheses.ended == []
