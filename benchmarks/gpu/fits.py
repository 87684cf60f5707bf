"""Compile attention and experts for each compute capability, without a GPU: do they fit its shared memory?

    python -m benchmarks.gpu.fits                 those nearest to their limit, seconds
    python -m benchmarks.gpu.fits --all           heads of 64 to 256, dtypes, page sizes: minutes
    python -m benchmarks.gpu.fits --all --capability 80
    python -m benchmarks.gpu.fits --json          for the test

A launch that needs more shared memory than there is fails when a server starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from benchmarks.gpu.kernels.attention_variants import GPUS, decode_variant, extend_variant
from benchmarks.gpu.kernels.compile_kernels import variants
from benchmarks.gpu.kernels.compiler import Variant, binary_of, copies_pending, usage
from model_worker.kernels.triton.tiles import (
    Heads,
    decode_shared_memory,
    decode_tile,
    extend_shared_memory,
    extend_tile,
)

AT_THE_EDGE = (80, 89, 90)
"""Capabilities that cover each size of shared memory and each way to multiply matrices."""
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class Case:
    capability: int
    variant: Variant
    estimate: int  # bytes, by tiles.py

    @property
    def limit(self) -> int:
        return GPUS[self.capability].shared_memory


def cases(capability: int, kernel: str) -> Iterator[Case]:
    """Yield cases of a kernel (decode or extend): plain, and as in Gemma 2 with a window and a softcap."""
    gpu = GPUS[capability]
    for head_dim, (dtype, kv_dtype), page_size, capped in product(HEAD_DIMS, DTYPES, (1, 16), (False, True)):
        if kv_dtype is torch.float8_e4m3fn and capability < 89:
            continue
        heads = Heads(4, head_dim, dtype, kv_dtype)
        name = (
            f"{kernel} head {head_dim} page {page_size}, {kv_dtype}".replace("torch.", "")
            + capped * " capped"
        )
        if kernel == "decode":
            estimate = decode_shared_memory(decode_tile(gpu, heads), heads)
            yield Case(capability, decode_variant(name, gpu, heads, page_size, is_capped=capped), estimate)
        else:
            estimate = extend_shared_memory(extend_tile(gpu, heads), heads, gpu)
            yield Case(capability, extend_variant(name, gpu, heads, page_size, is_capped=capped), estimate)


def nearest() -> Iterator[Case]:
    """Yield the cases that need most, and float32 experts, whose tiles are the same everywhere, on the device
    with the least shared memory.
    """
    for capability, kernel in product(AT_THE_EDGE, ("decode", "extend")):
        yield max(cases(capability, kernel), key=lambda case: case.estimate)
    experts = next(each for each in variants() if each.name == "experts down, 64 pairs")
    tensors = dict.fromkeys(("a", "matrices", "out", "weights"), "*fp32")
    floats = replace(experts, name=f"{experts.name}, float32", kinds={**experts.kinds, **tensors})
    yield Case(89, floats, GPUS[89].shared_memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--capability", type=int, choices=sorted(GPUS), action="append")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    arguments = parser.parse_args()
    chosen = arguments.capability or sorted(GPUS)
    every = (case for each in product(chosen, ("decode", "extend")) for case in cases(*each))
    fits = True
    for case in every if arguments.all else nearest():
        binary = binary_of(case.variant, case.capability)
        use = usage(binary)
        fits &= use["shared"] <= case.limit
        row = {
            "capability": case.capability,
            "name": case.variant.name,
            **use,
            "pending": copies_pending(binary),
            "estimate": case.estimate,
            "limit": case.limit,
        }
        print(json.dumps(row) if arguments.json else "  ".join(f"{v!s:>7}" for v in row.values()), flush=True)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
