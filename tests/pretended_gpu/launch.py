"""`python -m tests.pretended_gpu.launch ARGUMENT ...` is `launch.py` where the GPU is a pretended one.

On CUDA the worker lives in the scheduler's process, so that is where the GPU is. NUM_BYTES in the environment
is its memory.
"""

from __future__ import annotations

import os
import sys

import launch
from runtime import children
from runtime.process import ProcessContext, run_process

NUM_BYTES = "PRETENDED_GPU_BYTES"


def main(context: ProcessContext) -> None:
    """The scheduler process. What a GPU would have punished is an error of it, at the latest when it ends."""
    import torch

    from scheduler_proc.main import main
    from tests.pretended_gpu import pretended_gpu

    torch.set_num_threads(1)
    with pretended_gpu(int(os.environ.get(NUM_BYTES, 1 << 30))):
        main(context)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("-"):
        os.environ["TRITON_INTERPRET"] = "1"
        children.MODULES["scheduler"] = "tests.pretended_gpu.launch"
        sys.exit(launch.main([*sys.argv[1:], "--device", "cuda"]))
    run_process("scheduler", main)
