"""The gate before the factories of features: never closed to a request that one of them would answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from runtime.sampling.table import PARAMETERS
from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.core.output import make_output
from scheduler_proc.core.request import FeatureFactory, Request
from scheduler_proc.feature_factories import feature_factories
from scheduler_proc.features.beam_search.attaching import BeamSettings
from scheduler_proc.features.feature_gate import may_by_what_it_brings
from scheduler_proc.features.logits_processors import attach_logits_processors
from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.features.speculation.step_cost import StepCost
from tests.harness.scheduler.scheduler_parts import manager, request

KV = manager()
OUTPUT = make_output([])
FACTORIES: tuple[FeatureFactory, ...] = (
    attach_logits_processors(()),
    *feature_factories(
        OUTPUT, KV, float, SpeculationSettings(), StepCost(), beams=BeamSettings(2, KV.rows.max_rows)
    ),
)
VALUES: tuple[Any, ...] = (True, 1, 2, 0.5, ("hidden_states",), b"\1\0\0\0", object())


def is_answered(req: Request) -> bool:
    """Return True if a factory attaches something, refuses the request, or is at a loss with its value."""
    try:
        return any(factory(req) is not None for factory in FACTORIES)
    except Exception:
        return True


@pytest.mark.parametrize(
    "name", [parameter.name for parameter in PARAMETERS if parameter.name != "beam_width"]
)
def test_a_sampling_parameter_that_a_factory_answers_opens_the_gate(name: str) -> None:
    for value in VALUES:
        req = request(KV, 1, [1, 2, 3])
        req.sampling = msgspec.structs.replace(req.sampling, beam_width=2, **{name: value})
        assert may_by_what_it_brings(req) or not is_answered(req), value


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Request)])
def test_a_fact_of_the_request_that_a_factory_answers_opens_the_gate(name: str) -> None:
    if name in ("sampling", "features", "wanted_from"):  # the first is above, factories write the others
        return
    for value in VALUES:
        req = request(KV, 1, [1, 2, 3])
        setattr(req, name, value)
        assert may_by_what_it_brings(req) or not is_answered(req), value


def test_a_plain_request_is_answered_by_nobody_and_finds_the_gate_closed() -> None:
    req = request(KV, 1, [1, 2, 3])
    assert not is_answered(req)
    assert not may_by_what_it_brings(req)
    req.sampling = SamplingParams(logprobs=0)
    assert is_answered(req)
    assert may_by_what_it_brings(req)
