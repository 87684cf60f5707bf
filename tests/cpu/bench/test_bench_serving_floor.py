"""The floor that servers are held against: counted by hand for a tiny model, and used by each workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_serving.arguments import parse_args
from benchmarks.cpu.floor import Machine, ModelShape
from benchmarks.cpu.workloads import WORKLOADS

# 32 M weights: 8 layers, 8 query and 4 KV heads of 64.
SMALL = ModelShape(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=8192,
)
MACHINE = Machine(memory_gb_per_s=95.5, gflop_per_s=1054.0)
TINY = ModelShape(
    hidden_size=4, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2, vocab_size=10
)


def test_a_step_reads_weights_and_kv_once_or_computes_at_the_peak() -> None:
    # Each layer: q, k, v and o of 4 x 4, and three matrices of 4 x 6; then the head of 4 x 10.
    weights = 2 * (4 * 16 + 3 * 24) + 40
    kv_bytes = 3 * 7 * 2 * 2 * 4 * 2
    slow_memory = Machine(memory_gb_per_s=1e-9, gflop_per_s=1e9)
    assert TINY.step_s(slow_memory, 3, 7) == pytest.approx(2 * weights + kv_bytes)
    slow_compute = Machine(memory_gb_per_s=1e9, gflop_per_s=1e-9)
    assert TINY.step_s(slow_compute, 3, 7) == pytest.approx(3 * 2 * weights + 3 * 7 * 2 * 2 * 2 * 4)


def test_a_prompt_computes_every_token_but_only_the_last_ones_logits() -> None:
    slow_compute = Machine(memory_gb_per_s=1e9, gflop_per_s=1e-9)
    # Causal attention: half of 5 x 5 positions, two products of 4 numbers for each, in two layers.
    flops = 5 * 2 * (2 * (4 * 16 + 3 * 24)) + 2 * 40 + 2 * 2 * 4 * 25
    assert TINY.prefill_s(slow_compute, 2, 5) == pytest.approx(2 * flops)


@pytest.mark.parametrize(("num_rows", "step_ms"), [(1, 0.60), (8, 0.71), (32, 1.78)])
def test_few_rows_wait_for_memory_and_many_for_arithmetic(num_rows: int, step_ms: float) -> None:
    assert 1e3 * SMALL.step_s(MACHINE, num_rows, 192) == pytest.approx(step_ms, abs=0.006)


def test_a_model_is_read_from_its_config(tmp_path: Path) -> None:
    config = {name: getattr(SMALL, name) for name in SMALL.__struct_fields__}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    assert ModelShape.read(tmp_path) == SMALL
    assert (SMALL.query_size, SMALL.key_value_size) == (512, 256)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_one_that_bench_serving_takes_and_its_floor_names_its_figures(name: str) -> None:
    workload = WORKLOADS[name]
    parse_args(list(workload.flags))
    if workload.floor is not None:
        floor = workload.floor(SMALL, MACHINE)
        assert set(floor) & set(workload.figures)
        assert all(value > 0 for value in floor.values())
