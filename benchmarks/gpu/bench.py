"""Parts that the stages share, and the sizes of their measurements."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpu.kernels.kernel_rates import LLAMA_8B, HeadShape, Setting
from benchmarks.gpu.kernels.launch_calls import LLAMA_8B as LLAMA_8B_CALLS
from benchmarks.gpu.kernels.launch_calls import TINY as TINY_CALLS
from benchmarks.gpu.kernels.launch_calls import CallSizes
from benchmarks.gpu.kernels.launch_cost import BATCHES, CALLS
from benchmarks.gpu.kernels.linear_rates import LLAMA_8B as LINEARS
from benchmarks.gpu.kernels.prompt_attention import PROMPTS, Prompts
from benchmarks.gpu.library_batching import LOAD as BASELINE_LOAD
from benchmarks.gpu.load import Load
from benchmarks.gpu.timing import copy_rate, matrix_rate
from model_worker.device.base import Device

LOAD = Load(num_requests=256, input_len=512, output_len=256)


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements: for a GPU, or small enough for an interpreter."""

    copy_bytes: int = 1 << 30
    matrix: int = 8192
    repeats: int = 50
    decodes: tuple[tuple[int, int], ...] = ((1, 4096), (8, 4096), (64, 1024), (64, 4096), (256, 1024))
    prompt: int = 8192
    draws: tuple[int, ...] = (1, 64, 256)
    vocab_size: int = 151_936
    heads: HeadShape = LLAMA_8B
    linears: tuple[tuple[int, int], ...] = LINEARS
    linear_rows: tuple[int, ...] = (1, 8, 64, 256, 2048)
    products: tuple[str, ...] = ("llama-3.1-8b", "qwen3-0.6b")  # shapes whose linear layers are measured
    product_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 256)
    prompts: tuple[Prompts, ...] = PROMPTS
    calls: CallSizes = LLAMA_8B_CALLS
    timed_calls: tuple[int, int] = (CALLS, BATCHES)  # of which the host's time is taken, and how often
    graph_nodes: int = 1000
    reduced: tuple[int, ...] = (4096, 64 * 4096)  # numbers that ranks sum
    sweep_decodes: tuple[tuple[int, int], ...] = tuple(product((1, 8, 64), (1024, 4096)))
    sweep_chunks: tuple[tuple[int, int], ...] = ((8192, 0), (2048, 6144))  # new tokens, cached ones
    sweep_candidates: int = 20  # at most
    batches: tuple[int, ...] = (1, 8, 64, 256)
    graphs: tuple[bool, ...] = (True, False)  # of `decode`
    traced: int = 64  # the batch size of which `decode` writes a trace
    context: int = 1024
    num_steps: int = 100
    load: Load = LOAD
    baseline_load: Load = BASELINE_LOAD
    overlaps: tuple[bool, ...] = (True, False)  # of `serve`


TINY = Sizes(
    copy_bytes=1 << 16,
    matrix=32,
    repeats=1,
    decodes=((1, 20),),
    prompt=20,
    draws=(2,),
    vocab_size=300,
    heads=HeadShape(4, 2, 16),
    linears=((32, 80),),
    linear_rows=(2, 17),
    products=("tiny",),
    product_rows=(2,),
    prompts=(Prompts(5, 0), Prompts(2, 17, 2)),
    calls=TINY_CALLS,
    timed_calls=(1, 1),
    graph_nodes=3,
    reduced=(8,),
    sweep_decodes=((1, 20),),
    sweep_chunks=((9, 11),),
    sweep_candidates=3,
    batches=(1, 3),
    traced=3,
    context=20,
    num_steps=2,
    load=Load(3, 20, 6),
    baseline_load=Load(3, 20, 6),
    overlaps=(False,),
)


@dataclass(frozen=True)
class Bench:
    device: Device
    dtype: torch.dtype
    sizes: Sizes
    models: tuple[str, ...]
    out: Path

    @property
    def setting(self) -> Setting:
        return Setting(self.device, self.dtype, self.sizes.repeats, self.sizes.heads)

    def release(self) -> None:
        """Free device memory that is no longer used."""
        gc.collect()  # a runner's tables and recordings form a cycle
        self.device.free_bytes()  # empties the allocator's cache

    def copy_rate(self) -> float:
        return copy_rate(self.device.torch_device, self.sizes.copy_bytes, self.sizes.repeats)

    def matrix_rate(self) -> float:
        return matrix_rate(self.device.torch_device, self.sizes.matrix, self.dtype, self.sizes.repeats)
