"""Attention kernels as a launch on some GPU would specialise them."""

from __future__ import annotations

import torch

from benchmarks.gpu.kernels.compiler import Variant
from model_worker.kernels.triton.decode_attention import _attend_split
from model_worker.kernels.triton.extend_attention import _attend_tile
from model_worker.kernels.triton.tiles import Gpu, Heads, decode_tile, extend_tile, group_rows, padded

GPUS = {
    80: Gpu(163 << 10, by_warp_group=False),
    86: Gpu(99 << 10, by_warp_group=False),
    89: Gpu(99 << 10, by_warp_group=False),
    90: Gpu(227 << 10, by_warp_group=True),
    100: Gpu(227 << 10, by_warp_group=True),
    120: Gpu(99 << 10, by_warp_group=False),
}
"""Resources by compute capability times ten, from CUDA's programming guide."""
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv"}


def decode_variant(
    name: str,
    gpu: Gpu,
    heads: Heads,
    page_size: int,
    *,
    is_capped: bool = False,
    norms: bool = True,
) -> Variant:
    """Return the variant that a decode step launches. is_capped: with a window and a softcap. norms: norm the
    heads.
    """
    tile = decode_tile(gpu, heads)
    constants = {
        **_constants(heads, page_size, is_capped=is_capped),
        "HAS_NEW": True,
        "NORMS": norms,
        "ROTATES": True,
        "BLOCK_G": group_rows(heads.group),
        "BLOCK_N": tile.block_n,
    }
    return Variant(name, _attend_split, constants, tile.num_warps, tile.num_stages, _kinds(heads))


def extend_variant(name: str, gpu: Gpu, heads: Heads, page_size: int, *, is_capped: bool = False) -> Variant:
    tile = extend_tile(gpu, heads)
    constants = {
        **_constants(heads, page_size, is_capped=is_capped),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    kinds = {"kv_lens": "*i32", "query_start": "*i32", **_kinds(heads)}
    return Variant(name, _attend_tile, constants, tile.num_warps, tile.num_stages, kinds)


def _constants(heads: Heads, page_size: int, *, is_capped: bool) -> dict[str, int | bool]:
    return {
        "GROUP": heads.group,
        "HEAD_DIM": heads.head_dim,
        "BLOCK_D": padded(heads.head_dim),
        "PAGE_SIZE": page_size,
        "HAS_WINDOW": is_capped,
        "HAS_SOFTCAP": is_capped,
    }


def _kinds(heads: Heads) -> dict[str, str]:
    return {
        **dict.fromkeys(("q", "k", "v", "q_weight", "k_weight", "out"), NAMES[heads.dtype]),
        **dict.fromkeys(("k_pool", "v_pool"), NAMES[heads.kv_dtype]),
    }
