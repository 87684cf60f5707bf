"""Phases of a sequence from its stamps: without a gap, in order, whatever happened on the way."""

from __future__ import annotations

from itertools import pairwise

from carousel.client.tracing.phases import phases_of
from runtime.wire.perf_metrics import Stamp, StampName
from tests.harness.cases import for_each

PLAIN: list[StampName] = [
    *("tokenizer_in", "tokenizer_out", "scheduler", "row", "chunk"),
    *("first_token", "last_token", "closed", "detokenizer"),
]


def phases(names: list[StampName], end_s: float = 100.0) -> list[tuple[str, float, float]]:
    stamps = [Stamp(name, 11.0 + at) for at, name in enumerate(names)]
    found = list(phases_of(stamps, 10.0, end_s))
    assert found[0].start_s == 10.0
    assert found[-1].end_s == end_s
    assert all(before.end_s == after.start_s for before, after in pairwise(found))
    assert sorted(stamp.at_s for phase in found for stamp in phase.events) == [s.at_s for s in stamps]
    return [(phase.name, phase.start_s, phase.end_s) for phase in found]


def test_one_phase_follows_the_other() -> None:
    assert phases(PLAIN) == [
        ("tokenize", 10.0, 12.0),
        ("queue", 12.0, 14.0),
        ("prefill", 14.0, 16.0),
        ("decode", 16.0, 18.0),
        ("deliver", 18.0, 100.0),
    ]


@for_each(
    ("names", "expected"),
    [
        ([], "tokenize"),
        (["tokenizer_in", "tokenizer_out", "scheduler", "closed"], "tokenize queue deliver"),
        ([*PLAIN[:5], "retraction", *PLAIN[3:]], "tokenize queue prefill queue prefill decode deliver"),
        (
            [*PLAIN[:6], "retraction", "row", "chunk", "last_token", "closed"],
            "tokenize queue prefill decode queue decode deliver",
        ),
        (["attempt", *PLAIN], "tokenize tokenize queue prefill decode deliver"),
    ],
)
def test_what_happens_on_the_way_is_a_phase_of_its_own(names: list[StampName], expected: str) -> None:
    assert [name for name, _, _ in phases(names)] == expected.split()


def test_a_stamp_outside_the_request_makes_no_phase_backwards() -> None:
    stamps = [Stamp("tokenizer_out", 5.0), Stamp("row", 30.0)]
    found = [(phase.start_s, phase.end_s) for phase in phases_of(stamps, 10.0, 20.0)]
    assert found == [(10.0, 10.0), (10.0, 20.0), (20.0, 20.0)]
