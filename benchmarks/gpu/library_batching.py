"""The transformers library's continuous batching of a load, in a process that is killed when it is late.

    python -m benchmarks.gpu.library_batching --model qwen3-0.6b        one line of JSON

Random weights and token ids, greedy, all requests at once, in a manager that has done as much work before: no
HTTP is in its time. The library chooses its attention by what is installed; the result says which it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.load import Load
from benchmarks.gpu.shapes import SHAPES

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

ROOT = Path(__file__).resolve().parents[2]
LOAD = Load(num_requests=64, input_len=512, output_len=64)
LIMIT_S = 120.0
"""Seconds for the whole process: imports, weights, warm-up and measurement."""
ERROR_TAIL = 1500


def baseline(name: str, load: Load, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Run greedily, in a manager that the library sizes for these requests. Raises RuntimeError if
    one fails.
    """
    # Imported here, because it takes seconds and the runtime can be measured without it.
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]), dtype=dtype).eval()
    settings = None
    if device.type == "cpu":  # its cache would get a size by the machine's memory
        settings = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    generation = GenerationConfig(
        max_new_tokens=load.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    hints = WorkloadHints(load.input_len, load.output_len, load.num_requests)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings, workload_hints=hints
    ) as manager:
        for seed in (0, 1):  # the first is the warm-up
            began_s = time.perf_counter()
            manager.add_requests(inputs=load.prompts(name, seed), max_new_tokens=load.output_len)
            num_tokens = sum(_finished(manager) for _ in range(load.num_requests))
            duration_s = time.perf_counter() - began_s
        attention = model.config._attn_implementation  # before the manager restores the model's own
    if num_tokens != load.num_requests * load.output_len:
        raise RuntimeError(f"the library made {num_tokens} tokens of {load}")
    return {
        "output_tokens_per_s": num_tokens / duration_s,
        "duration_s": duration_s,
        "attention": attention,
    }


def _finished(manager: ContinuousBatchingManager) -> int:
    """Wait for the next request to end, and return its number of tokens."""
    while manager.is_running():
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            if output.error is not None:
                raise RuntimeError(f"the library failed: {output.error}")
            return len(output.generated_tokens)
    raise RuntimeError("the library's manager has stopped")


def baseline_process(name: str, load: Load, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run `baseline` in a process of its own, whose end also frees all device memory. Raises TimeoutError if
    it was killed, RuntimeError if it failed.
    """
    arguments = {
        "model": name,
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "requests": load.num_requests,
        "input-len": load.input_len,
        "output-len": load.output_len,
    }
    command = [sys.executable, "-m", "benchmarks.gpu.library_batching"]
    command += [f"--{key}={value}" for key, value in arguments.items()]
    result: dict[str, Any] = json.loads(last_line(command, LIMIT_S))
    return result


def last_line(command: list[str], limit_s: float) -> str:
    """Return the last line that a command prints. Raises TimeoutError if it was killed, RuntimeError if it
    failed.
    """
    try:
        run = subprocess.run(command, cwd=ROOT, timeout=limit_s, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"killed after {limit_s:g} s") from error
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}: {run.stderr[-ERROR_TAIL:]}")
    return run.stdout.splitlines()[-1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=LOAD.num_requests)
    parser.add_argument("--input-len", type=int, default=LOAD.input_len)
    parser.add_argument("--output-len", type=int, default=LOAD.output_len)
    arguments = parser.parse_args(argv)
    load = Load(arguments.requests, arguments.input_len, arguments.output_len)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    print(json.dumps(baseline(arguments.model, load, device, dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
