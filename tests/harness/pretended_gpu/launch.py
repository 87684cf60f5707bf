"""`python -m tests.harness.pretended_gpu.launch ARGUMENT ...` is `launch.py` with pretended GPUs.

On CUDA rank 0 of the model is in the scheduler's process, and the others are workers, so these processes have
the GPUs: as many as CUDA_VISIBLE_DEVICES names, 2 by default. PRETENDED_GPU_BYTES is the memory of each. A
second number, after a comma, is the memory that is left once the server is ready, as if its cache had been
emptied and another program had taken the rest.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from runtime.base.environment import visible_gpus
from runtime.launcher import main as launcher
from runtime.launcher.checks import device
from runtime.launcher.hosts import local
from runtime.ring.process import ProcessContext, run_process

NUM_BYTES = "PRETENDED_GPU_BYTES"
MODULES = {"scheduler": "scheduler_proc.main", "worker": "model_worker.main"}


def run(role: str) -> None:
    """A process of that role; what a GPU would have punished is an error of it, at the latest at its end."""
    import torch

    from tests.harness.pretended_gpu import pretended_gpu

    def main(context: ProcessContext) -> None:
        torch.set_num_threads(1)
        num_bytes, _, left = os.environ.get(NUM_BYTES, str(1 << 30)).partition(",")
        ready = context.ready
        with pretended_gpu(int(num_bytes), len(visible_gpus() or "0")) as gpu:

            def ready_beside_another(**info: int | float | str) -> None:
                memory = gpu.operations.memory
                memory.empty_cache()
                memory.capacity = memory.num_reserved + int(left)
                ready(**info)

            if left:
                context.ready = ready_beside_another  # type: ignore[method-assign]
            with gpu.seen_by_new_threads():  # that of adapters, which loads where nothing else runs
                import_module(MODULES[role]).main(context)

    run_process(role, main)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("-"):
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0,1")
        device.DRIVER_FILES, device.CPU_BUILD = (os.devnull,), "+pretended"
        local.MODULES["scheduler"] = "tests.harness.pretended_gpu.launch"
        local.MODULES["worker"] = "tests.harness.pretended_gpu.launch_rank"
        sys.exit(launcher.main([*sys.argv[1:], "--device", "cuda"]))
    run("scheduler")
