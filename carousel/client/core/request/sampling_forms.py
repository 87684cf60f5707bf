"""Sampling parameters as callers write them, and their form on the wire: lists, seeds, best_of, beams."""

from __future__ import annotations

from itertools import compress
from operator import attrgetter, is_not

import msgspec

from carousel.client.core.request.submission import Submission
from runtime.base.errors import InvalidRequest
from runtime.sampling.kinds import Counts, IdKind, Number, Stopping, TextsKind
from runtime.sampling.table import PARAMETERS, SEEDS
from runtime.wire.sampling_params import WITHOUT_BEAMS, SamplingParams, drawn_seed

REWRITTEN = tuple(
    p
    for p in PARAMETERS
    if isinstance(p.kind, IdKind | TextsKind | Counts | Stopping)
    or (isinstance(p.kind, Number) and p.nullable)
)
"""Parameters that callers may write in several forms."""
_REWRITTEN = tuple((p.name, p.kind.accept) for p in REWRITTEN)
_rewritten_of = attrgetter(*[p.name for p in REWRITTEN])
_DEFAULTS = _rewritten_of(SamplingParams())
NUMBERS = tuple(p for p in PARAMETERS if isinstance(p.kind, Number) and not p.nullable)
_numbers_of = attrgetter(*[p.name for p in NUMBERS])


def normalize(sampling: SamplingParams) -> SamplingParams:
    """Accept one stop string, lists, and a logit_bias mapping; draw a seed; check. Raises InvalidRequest."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams, got {type(sampling).__name__}", param="sampling_params"
        )
    values = _rewritten_of(sampling)
    # Most are the default: None, or the one empty tuple.
    given = compress(zip(_REWRITTEN, values, strict=True), map(is_not, values, _DEFAULTS))
    changes = {name: accept(name, value) for (name, accept), value in given}
    numbers = _numbers_of(sampling)
    if set(map(type, numbers)) != {float}:  # in most requests all are floats
        changes |= {p.name: p.kind.accept(p.name, each) for p, each in zip(NUMBERS, numbers, strict=True)}
    seed = sampling.seed
    if seed is None or seed == -1:
        changes["seed"] = drawn_seed()
    elif isinstance(seed, int) and not isinstance(seed, bool) and -SEEDS <= seed < 2 * SEEDS:
        changes["seed"] = seed % SEEDS
    sampling = msgspec.structs.replace(sampling, **changes)
    sampling.validate()
    return sampling


def params_for_wire(sampling: SamplingParams, submission: Submission) -> SamplingParams:
    """Return the parameters with `best_of` as the number of sequences, and with logprobs to choose by; for a
    beam search as its width.
    """
    if sampling.use_beam_search:
        return _with_beams(sampling, submission)
    best_of = sampling.best_of
    if best_of is None:
        return sampling
    if best_of == sampling.n:
        return msgspec.structs.replace(sampling, best_of=None)
    if submission.stream:
        raise InvalidRequest(
            f"best_of: the best {sampling.n} of {best_of} are known at the end only; "
            "do not stream, or leave best_of out",
            param="best_of",
        )
    logprobs = 0 if sampling.logprobs is None else sampling.logprobs
    return msgspec.structs.replace(sampling, n=best_of, best_of=None, logprobs=logprobs)


def _with_beams(sampling: SamplingParams, submission: Submission) -> SamplingParams:
    """Return the parameters of a beam search. A search of width 1 is not one."""
    most = max(sampling.beam_width_array, default=0)
    width = sampling.beam_width or most or sampling.best_of or sampling.n
    if width == 1:
        neutral = {name: values[0] for name, values in WITHOUT_BEAMS}
        sampling = msgspec.structs.replace(sampling, use_beam_search=False, **neutral)
    elif submission.stream and not submission.is_cumulative:
        raise InvalidRequest(
            "stream: which hypotheses of a beam search win is known at its end only, so nothing is new for "
            "good before; do not stream, or await an executor's responses, which have all ids each time",
            param="stream",
        )
    return msgspec.structs.replace(sampling, beam_width=width, best_of=None, temperature=0.0)
