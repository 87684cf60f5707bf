"""Time of sampling a step's rows on the CPU, C++ kernels against torch operations, turn by turn in one run.

    python -m benchmarks.bench_sampling [--cases 64x8192,8x151936] [--threads 1] [--seconds 1]

Cases are rows by vocabulary. Logits are random with a spread of 3, as a language model's. Milliseconds of the
process's CPU time, median and least, and the ratio of the least. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.device import make_device
from model_worker.kernels.native.library import NativeKernels
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.sampler import Sampler
from runtime.wire.format import pack_ids
from runtime.wire.plan import RowSetup
from runtime.wire.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "draw": {},
    "min-p 0.05": {"min_p": 0.05},
    "top-n-sigma 1": {"top_n_sigma": 1.0},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "greedy, penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
    },
    "greedy, masks": {"temperature": 0.0},
}
PROMPTS = {"prompt, most likely": 0, "prompt, at rank 100": 99, "prompt, least likely": -1}
"""Kinds without a draw: 5 logprobs of tokens at this place of their rows, and their ranks."""


def grammar_masks(num_rows: int, vocab_size: int) -> dict[int, bytes]:
    """Return masks by row, alternating between what a grammar allows between tokens of its own (a hundred
    ids) and within a text (all but a hundred).
    """
    rng = np.random.default_rng(0)
    few = np.zeros(32 * -(-vocab_size // 32), np.uint8)
    few[rng.integers(0, vocab_size, 100)] = 1
    masks = [np.packbits(bits, bitorder="little").tobytes() for bits in (few, 1 - few)]
    return {row: masks[row % 2] for row in range(num_rows)}


def make_step(
    kernels: NativeKernels | None, kind: dict[str, Any], logits: torch.Tensor, masks: Mapping[int, bytes]
) -> Callable[[], object]:
    """Return a function that samples a token for each row of the logits."""
    num_rows, vocab_size = logits.shape
    device, prompt = make_device("cpu", threaded=False), pack_ids(range(500))
    sampler = Sampler(device, max_rows=num_rows, max_len=1024, vocab_size=vocab_size, kernels=kernels)
    sampler.open_rows(
        [RowSetup.of(row, 500, SamplingParams(seed=row, **kind), prompt) for row in range(num_rows)]
    )
    rows, positions = np.arange(num_rows), np.full(num_rows, 500)
    who = SampleRows(torch.from_numpy(rows), torch.from_numpy(positions), rows, positions)
    scratch = torch.empty_like(logits)
    of_rows = {row: [mask] for row, mask in masks.items()}

    def step() -> object:
        scratch.copy_(logits)
        return sampler.sample(scratch, who, of_rows)

    return torch.inference_mode()(step)


def make_scoring(kernels: NativeKernels | None, place: int, logits: torch.Tensor) -> Callable[[], object]:
    """Return a function that scores the token at a place of the order of each row of the logits."""
    device, (_, vocab_size) = make_device("cpu", threaded=False), logits.shape
    sampler = Sampler(device, max_rows=1, max_len=1024, vocab_size=vocab_size, kernels=kernels)
    tokens = logits.argsort(dim=1, descending=True)[:, place].contiguous()
    return torch.inference_mode()(lambda: sampler.prompt_logprobs_of(logits, tokens, 5))


def measure(steps: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Return milliseconds of each step, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or any(len(each) < 5 for each in times.values()):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append((time.process_time() - began) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["64x8192", "8x151936"])
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind of each case")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = CpuNativeAttention().kernels
    results: dict[str, Any] = {}
    for case in options.cases:
        num_rows, vocab_size = map(int, case.split("x"))
        logits = 3.0 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
        for kind in (*KINDS, *PROMPTS):
            if options.only not in kind:
                continue
            masks = grammar_masks(num_rows, vocab_size) if kind.endswith("masks") else {}
            samplers = {"torch": None, "native": kernels}
            steps = {
                name: make_scoring(each, PROMPTS[kind], logits)
                if kind in PROMPTS
                else make_step(each, KINDS[kind], logits, masks)
                for name, each in samplers.items()
            }
            times = measure(steps, options.seconds)
            median = {name: round(statistics.median(each), 3) for name, each in times.items()}
            least = {name: round(min(each), 3) for name, each in times.items()}
            results[f"{case} {kind}"] = {"median": median, "least": least}
            line = "  ".join(f"{name} {median[name]:8.3f} ({least[name]:.3f}) ms" for name in steps)
            print(f"{case:>10} {kind:<20} {line}  {least['torch'] / least['native']:.1f}x", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
