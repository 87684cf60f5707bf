"""Facts about a machine with a GPU: programs, versions, results of imports, one kernel, one graph.

python -m benchmarks.gpu.facts --out DIR        writes DIR/facts.json

It needs only Python to start. An "error" takes the place of anything that is missing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Results

PROGRAMS = ("gcc", "g++", "nvcc", "nvidia-smi", "ncu", "compute-sanitizer", "make")
PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "uvloop", "pytest"),
    *("pytest-xdist", "msgspec", "pyzmq", "httptools", "setproctitle", "starlette", "uvicorn"),
)
PROCESSES = (
    *("launch", "carousel.server.main", "tokenizer_proc.main", "scheduler_proc.main"),
    *("detokenizer_proc.main", "model_worker.main", "bench_serving.main"),
)
PROGRAM_TIMEOUT_S = 20


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"python": sys.version, "kernel": platform.release(), "cpus": os.cpu_count(), "bytes": memory}


def programs() -> dict[str, Any]:
    """Return the last line of each program's version output; None if it is not installed."""
    found: dict[str, Any] = dict.fromkeys(PROGRAMS)
    for name in filter(shutil.which, PROGRAMS):
        arguments = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        command = [name, *(arguments if name == "nvidia-smi" else ("--version",))]
        said = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PROGRAM_TIMEOUT_S
        ).stdout
        found[name] = (said.strip().splitlines() or [""])[0 if name in ("gcc", "g++") else -1]
    return found


def versions() -> dict[str, Any]:
    """Return the versions of packages; None for those that are not installed."""
    found: dict[str, Any] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def imported(name: str) -> dict[str, Any]:
    began = time.monotonic()
    importlib.import_module(name)
    return {"seconds": time.monotonic() - began}


def gpu() -> dict[str, Any]:
    import torch

    properties: Any = torch.cuda.get_device_properties()
    return {
        "name": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "multiprocessors": properties.multi_processor_count,
        "shared_memory": properties.shared_memory_per_block_optin,
        "bytes_free_and_total": torch.cuda.mem_get_info(),
        "cuda": torch.version.cuda,
    }


def kernel() -> dict[str, Any]:
    """Check that a kernel can be launched. Triton's launcher needs a C compiler for the first one."""
    import torch

    from model_worker.kernels.triton.embedding import embed

    began = time.monotonic()
    weight = torch.arange(64.0).view(4, 16).to("cuda")
    rows = embed(torch.arange(3).to("cuda"), weight, scale=2.0)
    assert torch.equal(rows.cpu(), 2.0 * weight.cpu()[:3]), "a kernel computes something else"
    return {"seconds": time.monotonic() - began}


def graph() -> dict[str, Any]:
    import torch

    from model_worker.device import make_device

    device = make_device("cuda", threaded=False)
    x = torch.zeros(4, device=device.torch_device)
    torch.cuda.synchronize()  # for memory that the recording's stream reads

    def add() -> None:
        x.add_(1.0)

    def replayed() -> None:
        recorded = device.capture(add)
        x.zero_()
        for _ in range(3):
            recorded.replay()

    device.forward_stream.launch(replayed).wait()
    assert x.tolist() == [3.0] * 4, "a graph computes something else"
    return {"replays": 3}


def main(argv: list[str] | None = None) -> int:
    """Write the facts. Returns 1 if something is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out / "facts.json", lambda: None)
    looks: tuple[Callable[[], dict[str, Any]], ...] = (machine, programs, versions, gpu, kernel, graph)
    for look in looks:
        results.measure(look.__name__, look)
    for name in PROCESSES:
        results.add("imports", lambda name=name: imported(name), module=name)  # type: ignore[misc]
    results.end()
    print(json.dumps(results.values, indent=1))
    return 1 if results.num_errors else 0


if __name__ == "__main__":
    sys.exit(main())
