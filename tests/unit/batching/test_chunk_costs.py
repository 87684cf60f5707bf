"""Chunks of a long prompt where later tokens cost more: each takes as long as the first one."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest

from runtime.base.errors import ConfigError
from runtime.checkpoint.model_config import ModelConfig
from runtime.launcher.resolved_config import resolve_config
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from scheduler_proc.batching.chunk_costs import LEAST_PART, ChunkCosts


def time_of(start: int, num_new: int, span: int) -> float:
    """Time of a chunk, where that of a prompt's first token is 1."""
    return num_new + (start * num_new + num_new**2 / 2) / span


@pytest.mark.parametrize("span", [30_000, 100_000])
def test_each_chunk_of_a_long_prompt_takes_as_long_as_the_first(span: int) -> None:
    costs, lengths, start = ChunkCosts(2048, span), [], 0
    whole = time_of(0, 2048, span)
    while start < 1 << 17:
        lengths.append(costs.most(start, 2048))
        assert time_of(start, lengths[-1], span) == pytest.approx(whole, rel=0.005)
        start += lengths[-1]
    assert lengths[0] == 2048
    assert all(later < earlier for earlier, later in pairwise(lengths))
    assert lengths[-1] == pytest.approx(2048 / (1 + (1 << 17) / span), rel=0.05)


def test_a_chunk_is_never_cut_to_less_than_a_part_and_takes_no_more_than_the_budget() -> None:
    """However far behind it is, and however little of the budget is left."""
    rng = Random(4)
    for _ in range(2000):
        whole, span = rng.randrange(1, 300), rng.randrange(1, 500)
        costs = ChunkCosts(whole, span)
        start, budget = rng.randrange(0, 5000), rng.randrange(1, whole + 1)
        most = costs.most(start, budget)
        assert min(budget, max(1, whole // LEAST_PART)) <= most <= budget
        assert most <= costs.cost(start, most, budget) <= budget
        if most > max(1, whole // LEAST_PART):
            assert time_of(start, most, span) <= time_of(0, whole, span) * budget / whole + 1e-6
            assert most == budget or time_of(start, most + 1, span) > time_of(0, whole, span) * budget / whole


def test_how_far_back_a_token_sees_at_twice_the_time() -> None:
    """A layer multiplies 4,096 * 128 * (2 * 32 + 2 * 8) + 3 * 4,096 * 14,336 times for a token alone, and
    2 * 32 * 128 times for each token that it sees.
    """
    model = msgspec.structs.replace(
        ModelConfig.from_path(DEMO_MODEL),
        num_layers=2,
        sliding_windows=(None, None),
        expert_layers=(False, False),
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    assert model.attention_span() == 26_624
    half_seeing = msgspec.structs.replace(model, sliding_windows=(1024, None))
    assert half_seeing.attention_span() == 2 * 26_624
    assert msgspec.structs.replace(model, max_attention_window=512).attention_span() == 0


@pytest.mark.parametrize(
    ("settings", "has_spec", "says"),
    [
        ({"disable_chunked_prefill": True}, True, "prompts are computed whole"),
        ({}, False, "models that have a spec"),
    ],
)
def test_where_chunks_cannot_shrink_it_is_refused(
    settings: dict[str, bool], has_spec: bool, says: str
) -> None:
    config = RuntimeConfig(device="cpu", enable_dynamic_chunking=True, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"enable_dynamic_chunking: .*{says}"):
        resolve_config(config, context_length=512, dtype="float32", model_path=DEMO_MODEL, has_spec=has_spec)
