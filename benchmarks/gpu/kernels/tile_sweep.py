"""Attention with other launch parameters than a server uses, in order to find better numbers for tiles.py.

About sixty compilations of a second each, and a dozen timings for each shape. A candidate that does not
compile, does not fit or computes something else is recorded as such.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.gpu.kernels.kernel_rates import DecodeWork, ExtendWork, Setting
from benchmarks.gpu.timing import recorded_ms, wait
from model_worker.device.base import Device
from model_worker.kernels.triton.tiles import (
    DecodeTile,
    ExtendTile,
    Heads,
    decode_tile,
    extend_tile,
    gpu_of,
)

logger = logging.getLogger("gpu")

DECODE_TILES = (
    DecodeTile(64, 4, 3),
    DecodeTile(64, 4, 5),
    DecodeTile(64, 4, 7),
    DecodeTile(64, 8, 5),
    DecodeTile(32, 4, 3),
    DecodeTile(32, 4, 5),
    DecodeTile(32, 4, 7),
    DecodeTile(128, 4, 3),
    DecodeTile(128, 4, 5),
    DecodeTile(128, 8, 5),
    # Fewer warps have larger parts of a block of keys, and synchronise less.
    DecodeTile(32, 2, 5),
    DecodeTile(64, 2, 5),
    DecodeTile(64, 1, 5),
    DecodeTile(128, 2, 4),
)
SPLIT_FACTORS = (0.5, 2, 4)  # times as many programs as a server launches
EXTEND_TILES = (
    ExtendTile(128, 64, 8, 5),
    ExtendTile(128, 64, 8, 3),
    ExtendTile(128, 64, 8, 2),
    ExtendTile(128, 32, 8, 5),
    ExtendTile(128, 128, 8, 3),
    ExtendTile(128, 128, 8, 5),
    ExtendTile(64, 64, 4, 2),
    ExtendTile(64, 64, 4, 5),
    ExtendTile(64, 32, 4, 5),
    ExtendTile(64, 128, 4, 3),
)
TOLERANCE = 3e-2  # of the largest: weights have bfloat16's 8 bits, and sums another order


class Candidate(NamedTuple):
    parameters: dict[str, int]
    run: Callable[[], object]


@dataclass(frozen=True)
class Sweep:
    setting: Setting
    most: int  # candidates of a shape at most

    @property
    def _heads(self) -> Heads:
        num_heads, num_kv_heads, head_dim = self.setting.heads
        return Heads(num_heads // num_kv_heads, head_dim, self.setting.dtype, self.setting.dtype)

    def decode(self, batch: int, context: int, page_size: int) -> dict[str, Any]:
        work = DecodeWork(batch, context, page_size, self.setting)
        default = decode_tile(gpu_of(self.setting.at), self._heads)
        launches = [(default, work.splits)]
        launches += [(default, int(factor * work.splits)) for factor in SPLIT_FACTORS]
        launches += [(tile, work.splits) for tile in DECODE_TILES if tile != default]
        candidates = [
            Candidate({**tile._asdict(), "splits": splits}, partial(work.run, tile, splits))
            for tile, splits in launches
            if splits > 0
        ]
        shape = {"batch": batch, "context": context, "page_size": page_size}
        return {**shape, **self._tried(candidates, work.out, "bytes_per_s", work.num_bytes)}

    def extend(self, num_new: int, num_cached: int, page_size: int) -> dict[str, Any]:
        work = ExtendWork(num_new, num_cached, page_size, self.setting)
        default = extend_tile(gpu_of(self.setting.at), self._heads)
        tiles = [default, *(tile for tile in EXTEND_TILES if tile != default)]
        candidates = [Candidate(tile._asdict(), partial(work.run, tile)) for tile in tiles]
        shape = {"new": num_new, "cached": num_cached, "page_size": page_size}
        return {**shape, **self._tried(candidates, work.out, "operations_per_s", work.operations)}

    def _tried(self, candidates: list[Candidate], out: Tensor, rate: str, amount: float) -> dict[str, Any]:
        tried = ranked(candidates[: self.most], out, self.setting.device, self.setting.repeats)
        for each in tried:
            if "ms" in each:
                each[rate] = amount / (each["ms"] * 1e-3)
        default = next(each for each in tried if each["is_default"])
        logger.info("default %s, best %s", default, tried[0])
        return {"default_over_best": default["ms"] / tried[0]["ms"], "tried": tried}


def ranked(
    candidates: Sequence[Candidate], out: Tensor, device: Device, repeats: int
) -> list[dict[str, Any]]:
    """Return parameters and "ms" of each candidate, the fastest first, then those with an "error". The first
    candidate is what a server uses; its result in `out` is the reference for the others, so it has to work.
    """
    candidates[0].run()
    expected = out.clone()
    timed, failed = [], []
    for n, candidate in enumerate(candidates):
        parameters: dict[str, Any] = {**candidate.parameters, "is_default": n == 0}
        out.fill_(torch.nan)
        try:
            candidate.run()
            wait(device.torch_device)
            if not (out - expected).abs().max() <= TOLERANCE * expected.abs().max():
                failed.append({**parameters, "error": "computes something else"})
                continue
            timed.append({**parameters, "ms": recorded_ms(candidate.run, device, repeats)})
        except (TritonError, RuntimeError) as error:
            wait(device.torch_device)  # raises where the device is lost
            failed.append({**parameters, "error": f"{type(error).__name__}: {error}"[:300]})
    return sorted(timed, key=lambda each: each["ms"]) + failed
