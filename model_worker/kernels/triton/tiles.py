"""Launch parameters (tiles) of the attention kernels, chosen by the resources of the device.

Nothing here has been measured on hardware. The reasons are counts from compiled code
(docs/measurements/gpu_kernels.md, "Tiles of the attention kernels"). `make gpu-kernels` measures other tiles
for comparison (benchmarks/gpu/kernels/tile_sweep.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton

from runtime.base.errors import ConfigError


class Gpu(NamedTuple):
    """Resources of a device for one program (thread block)."""

    shared_memory: int
    """Bytes of shared memory for one program. CUDA's programming guide: 163 KiB at capability 8.0, 99 at 8.6,
    8.9 and 12, 227 at 9 and 10.
    """
    by_warp_group: bool
    """True if four warps multiply 64 rows together with one operand in shared memory: capability 9 and 10."""


LEAST = Gpu(99 << 10, by_warp_group=False)
"""Resources that every device of capability 8.0 or later has. Triton's interpreter uses it."""
RESERVED = 1 << 10
"""Bytes of a multiprocessor's shared memory that CUDA reserves for each program (programming guide)."""
MIN_SIDE = 16
"""Smallest side of a matrix product that tl.dot accepts."""
NUM_STAGES = 5
"""Number of pipeline stages. Keys and values are found by page numbers, which are loads, too, and the
compiler divides a loop's stages between both levels. With 2 to 4 stages it waits for a block right after
asking for it; with 5 one more block is on its way meanwhile.
"""


class DecodeTile(NamedTuple):
    block_n: int  # keys
    num_warps: int = 4
    num_stages: int = NUM_STAGES


class ExtendTile(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int = 8
    num_stages: int = NUM_STAGES


class Heads(NamedTuple):
    """Head counts and sizes of an attention layer."""

    group: int  # query heads of a key head
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


DECODE_TILES = tuple(DecodeTile(n) for n in (64, 32, 16))
# By the width of a head that they are for; the first that fits. Eight warps with products of warp groups are
# two groups, each with its 64 rows, and read keys half as often as one. Blocks: the longest without spills.
WARP_GROUP_TILES = {
    128: (ExtendTile(128, 64),),
    256: (ExtendTile(128, 32),),
    512: (ExtendTile(64, 16),),
}
WARP_TILES = {
    64: (ExtendTile(128, 64),),
    128: (ExtendTile(128, 32),),
    256: (ExtendTile(64, 32), ExtendTile(64, 16)),
    512: (ExtendTile(16, 16),),
}
# Float32 is multiplied without matrix units, each thread with its operands in registers: smaller tiles, more
# threads.
FLOAT32_DECODE_TILES = tuple(DecodeTile(n, num_warps=8) for n in (32, 16))
FLOAT32_TILES = {
    64: (ExtendTile(32, 32),),
    128: (ExtendTile(32, 16),),
    512: (ExtendTile(16, 16),),
}

T = TypeVar("T", DecodeTile, ExtendTile)


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the resources of a CUDA device; for a CPU `LEAST`."""
    if device.type != "cuda":
        return LEAST
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub does not know all of them
    shared_memory: int = properties.shared_memory_per_block_optin
    return Gpu(shared_memory, by_warp_group=torch.cuda.get_device_capability(device)[0] in (9, 10))


def padded(head_dim: int) -> int:
    """Return a head's width as kernels compute with it."""
    return max(MIN_SIDE, int(triton.next_power_of_2(head_dim)))


def group_rows(group: int) -> int:
    """Return the number of rows of decode attention's matrix products, for `group` query heads of a
    key head.
    """
    return max(MIN_SIDE, int(triton.next_power_of_2(group)))


@cache
def decode_tile(gpu: Gpu, heads: Heads) -> DecodeTile:
    """Choose the longest block of keys for which two programs fit on a multiprocessor, so that one computes
    while the other waits; else the longest that fits. Raises ConfigError if none does.
    """
    tiles = FLOAT32_DECODE_TILES if heads.dtype is torch.float32 else DECODE_TILES
    needs = [(tile, decode_shared_memory(tile, heads)) for tile in tiles]
    for tile, need in needs:
        if 2 * (need + RESERVED) <= gpu.shared_memory + RESERVED:
            return tile
    return _first_that_fits(needs, gpu, heads)


@cache
def extend_tile(gpu: Gpu, heads: Heads) -> ExtendTile:
    """Choose the tile of the kernel for chunks. Raises ConfigError if no tile fits."""
    tiles = WARP_GROUP_TILES if gpu.by_warp_group else WARP_TILES
    if heads.dtype is torch.float32:
        tiles = FLOAT32_TILES
    width = min((each for each in tiles if each >= heads.head_dim), default=max(tiles))
    needs = [(tile, extend_shared_memory(tile, heads, gpu)) for tile in tiles[width]]
    return _first_that_fits(needs, gpu, heads)


def decode_shared_memory(tile: DecodeTile, heads: Heads) -> int:
    """Return the most bytes of shared memory that a program of decode attention takes."""
    return _shared_memory(group_rows(heads.group), tile.block_n, _blocks_kept(tile.num_stages), heads)


def extend_shared_memory(tile: ExtendTile, heads: Heads, gpu: Gpu) -> int:
    """Return the most bytes of shared memory that a program of extend attention takes."""
    blocks = _blocks_kept(tile.num_stages)
    if not gpu.by_warp_group or heads.dtype is torch.float32:
        return _shared_memory(tile.block_m, tile.block_n, blocks, heads)
    # A product of warp groups may still be reading its block when the one after the next is asked for, and
    # reads it in the queries' dtype.
    converted = 0
    if heads.kv_dtype is not heads.dtype:
        converted = tile.block_n * padded(heads.head_dim) * heads.dtype.itemsize
    return _shared_memory(tile.block_m, tile.block_n, blocks + 1, heads) + converted


def _blocks_kept(num_stages: int) -> int:
    """Return the number of blocks of keys that are being loaded or used, as the compiler divides the stages
    (in both releases that benchmarks.gpu.fits was run with).
    """
    return max(1, -(-(num_stages - 2) // 2))


def _shared_memory(rows: int, keys: int, blocks: int, heads: Heads) -> int:
    """Return the bytes of shared memory for queries; keys and values; weights; page numbers, for keys and for
    values; and sums across warps.
    """
    width, size = padded(heads.head_dim), heads.dtype.itemsize
    return (
        rows * width * size
        + blocks * 2 * keys * width * heads.kv_dtype.itemsize
        + rows * keys * size
        + blocks * 2 * keys * 4
        + 8 * rows * 4
    )


def _first_that_fits(needs: Iterable[tuple[T, int]], gpu: Gpu, heads: Heads) -> T:
    for tile, need in needs:
        if need <= gpu.shared_memory:
            return tile
    dtype = str(heads.dtype).removeprefix("torch.")
    raise ConfigError(
        f"attention_backend: triton has no tile for heads of {heads.head_dim} in {dtype} that fits the "
        f"{gpu.shared_memory >> 10} KiB of shared memory that this GPU gives a program: {TAKE_LESS}"
    )


TAKE_LESS = "use --dtype bfloat16, another --attention-backend, or --device cpu"
