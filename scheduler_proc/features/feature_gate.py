"""The gate before the factories of features: nearly no request asks for any, and to ask each of them takes
ten times as long.
"""

from __future__ import annotations

from operator import attrgetter

from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.core.request import Request

ASKING = (
    "additional_outputs", "logprobs", "prompt_logprobs", "return_context_logits", "return_generation_logits",
    "return_perf_metrics", "speculative_num_draft_tokens", "use_beam_search",
)  # fmt: skip
"""Sampling parameters that a factory may answer with a feature: tests/cpu/scheduler/test_feature_gate.py asks
all factories about all parameters.
"""
_asked = attrgetter(*ASKING)
_NOTHING = _asked(SamplingParams())


def may_by_what_it_brings(req: Request) -> bool:
    """Tell whether a request brings anything that a factory of a launch without guesses looks at."""
    return (
        _asked(req.sampling) != _NOTHING
        or req.guide is not None
        or req.trace is not None
        or req.processing is not None
        or bool(req.draft_ids)
        or bool(req.prediction_ids)
    )
