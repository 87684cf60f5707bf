"""`python -m tests.harness.pretended_gpu.run -m MODULE ARGUMENT ...` runs a module with a pretended GPU."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
    import torch

    from tests.harness.pretended_gpu import pretended_gpu

    torch.set_num_threads(1)
    _, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    code: object = 0
    with pretended_gpu():
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:  # else what the GPU found at its end would be lost
            code = end.code
    sys.exit(code)  # type: ignore[arg-type]
