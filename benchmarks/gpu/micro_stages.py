"""Stages that measure parts of a step: prompt attention by each library, launches, graphs, copies, NCCL."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.launch_calls import launch_calls
from benchmarks.gpu.kernels.launch_cost import launch_costs, of_layers
from benchmarks.gpu.kernels.prompt_attention import attention_rates
from benchmarks.gpu.kernels.small_costs import block_copy, graph_gap, nccl_one_rank
from benchmarks.gpu.results import Results


@torch.inference_mode()
def attention_stage(bench: Bench, results: Results) -> None:
    matrix = bench.matrix_rate()
    results.put(matrix_operations_per_s=matrix)
    for prompts in bench.sizes.prompts:
        results.add_each("prompts", attention_rates(prompts, bench.setting, matrix), **prompts._asdict())


@torch.inference_mode()
def launch_cost_stage(bench: Bench, results: Results) -> None:
    calls = launch_calls(bench.device, bench.dtype, bench.sizes.calls)
    num_calls, num_batches = bench.sizes.timed_calls
    costs = []
    for name, run in calls.items():
        costs += launch_costs(bench.device, {name: run}, num_calls=num_calls, num_batches=num_batches)
        results.put(calls=costs)
    results.put(layers=of_layers(costs))


@torch.inference_mode()
def graph_gap_stage(bench: Bench, results: Results) -> None:
    nodes = bench.sizes.graph_nodes
    results.measure("kernels", partial(graph_gap, bench.device, nodes, bench.sizes.repeats))


@torch.inference_mode()
def block_copy_stage(bench: Bench, results: Results) -> None:
    for batch in bench.sizes.batches:
        results.add("copies", partial(block_copy, bench.device, batch, bench.sizes.repeats))


@torch.inference_mode()
def nccl_stage(bench: Bench, results: Results) -> None:
    for size in bench.sizes.reduced:
        results.add("all_reduce", partial(nccl_one_rank, bench.device, size, bench.sizes.repeats))
