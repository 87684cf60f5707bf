"""Quick check before the feature factories. Nearly no request asks for a feature, and asking each factory
takes ten times as long.
"""

from __future__ import annotations

from operator import attrgetter

from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.core.request import Request

ASKING = (
    "additional_outputs", "logprobs", "prompt_logprobs", "return_context_logits", "return_generation_logits",
    "return_perf_metrics", "speculative_num_draft_tokens", "use_beam_search",
)  # fmt: skip
"""Sampling parameters for which a factory may return a feature. tests/cpu/scheduler/test_feature_gate.py
compares them with what all factories do.
"""
_asked = attrgetter(*ASKING)
_NOTHING = _asked(SamplingParams())


def may_by_what_it_brings(req: Request) -> bool:
    """Return True if the request has anything that a factory may answer with a feature, in a launch without
    speculation.
    """
    return (
        _asked(req.sampling) != _NOTHING
        or req.guide is not None
        or req.trace is not None
        or req.processing is not None
        or bool(req.draft_ids)
        or bool(req.prediction_ids)
    )
