"""Phases of a sequence between the request and its answer, made of its stamps.

tokenize ─ queue ─ prefill ─ decode ─ deliver        one follows the other without a gap
    ▲        ▲────────┴────────┘ retraction
    └── attempt: a process was replaced
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from runtime.wire.perf_metrics import Stamp, StampName

PhaseName: TypeAlias = Literal["tokenize", "queue", "prefill", "decode", "deliver"]
NEXT: dict[StampName, PhaseName] = {
    "tokenizer_out": "queue",
    "row": "prefill",
    "first_token": "decode",
    "retraction": "queue",
    "attempt": "tokenize",
    "closed": "deliver",
}


@dataclass(slots=True)
class RequestPhase:
    name: PhaseName
    start_s: float
    end_s: float
    events: list[Stamp] = field(default_factory=list)
    """Stamps in the phase. The first one is that of its beginning."""


def phases_of(stamps: Sequence[Stamp], start_s: float, end_s: float) -> Iterator[RequestPhase]:
    """Yield the phases of a sequence whose request arrived at start_s and was answered at end_s."""
    phase, has_tokens = RequestPhase("tokenize", start_s, end_s), False
    for stamp in stamps:
        has_tokens = has_tokens or stamp.name == "first_token"
        name = NEXT.get(stamp.name)
        if name is None:
            phase.events.append(stamp)
            continue
        if name == "prefill" and has_tokens:
            name = "decode"  # tokens that it had are computed again, and no first token follows
        at_s = min(max(stamp.at_s, phase.start_s), end_s)
        phase.end_s = at_s
        yield phase
        phase = RequestPhase(name, at_s, end_s, [stamp])
    yield phase
