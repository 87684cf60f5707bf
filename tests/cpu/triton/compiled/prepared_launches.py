"""Some launches, and how often Triton compiles for them.

    python -m tests.cpu.triton.compiled.prepared_launches

launches them for Hopper, through a driver that launches nothing, in a process whose kernels are not
interpreted; it prints whether the code of each was in Triton's cache.
"""

from __future__ import annotations

import json
from typing import Any

import torch


def launch(device: str) -> None:
    from model_worker.kernels.triton.activation import activate_and_mul
    from model_worker.kernels.triton.embedding import embed
    from model_worker.kernels.triton.rms_norm import fused_add_rms_norm

    x, weight = (torch.zeros(*shape, dtype=torch.bfloat16, device=device) for shape in ((3, 64), (64,)))
    fused_add_rms_norm(x, x.clone(), weight, 1e-5)
    activate_and_mul("silu", x)
    # One of them at an address that is no multiple of 16, and a number that is 1.
    embed(torch.zeros(3, dtype=torch.int64, device=device)[1:], x[:1], first=0, scale=0.5)


def main() -> None:
    from triton import knobs

    from benchmarks.gpu.fake_driver import fake_driver

    hits: list[bool] = []

    def note(*, cache_hit: bool, **_: Any) -> None:
        hits.append(cache_hit)

    knobs.compilation.listener = note
    with fake_driver(), torch.inference_mode():
        launch("cpu")
    print(json.dumps(hits))


if __name__ == "__main__":
    main()
