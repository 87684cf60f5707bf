"""Launches one attention kernel a few times, for a profiler to examine one of the launches.

    ncu --clock-control none --set detailed --kernel-name _attend_split --launch-skip 4 --launch-count 1 \\
        python -m benchmarks.gpu.kernels.one_kernel decode

    decode    64 sequences of 4,096 tokens, heads of Llama 3.1 8B
    extend    a prompt of 8,192 tokens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch

from benchmarks.gpu.kernels.kernel_rates import DecodeWork, ExtendWork, Setting
from benchmarks.gpu.timing import wait
from model_worker.device import make_device

LAUNCHES = 8
WORKS: dict[str, Callable[[Setting], DecodeWork | ExtendWork]] = {
    "decode": lambda setting: DecodeWork(64, 4096, 16, setting),
    "extend": lambda setting: ExtendWork(8192, 0, 16, setting),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", choices=WORKS)
    name: str = parser.parse_args(argv).work
    device = make_device("cuda", threaded=False)
    with torch.inference_mode():
        work = WORKS[name](Setting(device, torch.bfloat16, repeats=1))
        for _ in range(LAUNCHES):
            work.run()
        wait(device.torch_device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
