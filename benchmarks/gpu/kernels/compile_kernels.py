"""Compile every Triton kernel for Hopper (sm_90) without a GPU, and say what the code needs.

    python -m benchmarks.gpu.kernels.compile_kernels            # a table
    python -m benchmarks.gpu.kernels.compile_kernels --json     # for the test that compares
    python -m benchmarks.gpu.kernels.compile_kernels --record tests/cpu/triton/compiled/sm90.json

The last one records what this compiler makes of them.

A spill (local memory) in an inner loop costs more than any other mistake in these kernels, and the registers
bound how many programs a multiprocessor runs; neither needs a GPU to be seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

from benchmarks.gpu.kernels.attention_variants import GPUS, decode_variant, extend_variant
from benchmarks.gpu.kernels.compiler import FP8_POOLS, Variant, compiled
from model_worker.kernels.triton import (
    activation,
    combine,
    decode_attention,
    decode_inputs,
    embedding,
    expert_choice,
    experts,
    fp8_rows,
    lora,
    rms_norm,
    rope,
    rope_kv_store,
    top_logprobs,
    truncation,
)
from model_worker.kernels.triton.tiles import Heads
from model_worker.sampling.triton import draw, logit_edits


def variants() -> Iterator[Variant]:
    """Yield the variants that Llama-3.1-8B (heads of 128, groups of 4) and Qwen3-0.6B (groups of
    2) launch.
    """
    yield from _of_attention()
    yield from _of_layers()
    yield from _of_experts()
    yield from _of_adapters()
    yield from _of_a_step()
    yield from _of_sampling()


def _of_attention() -> Iterator[Variant]:
    hopper, heads = GPUS[90], Heads(4, 128, torch.bfloat16, torch.bfloat16)
    fp8 = heads._replace(kv_dtype=torch.float8_e4m3fn)
    for page_size in (1, 16):
        yield decode_variant(f"decode page {page_size}", hopper, heads, page_size)
    yield decode_variant("decode page 16, fp8", hopper, fp8, 16)
    large = heads._replace(group=2, head_dim=256)
    yield decode_variant("decode window softcap head 256", hopper, large, 16, is_capped=True)
    constants = {"BLOCK_S": decode_attention.MAX_SPLITS, "HEAD_DIM": 256, "BLOCK_D": 256}
    yield Variant("merge head 256", decode_attention._merge_splits, constants, 4)
    for page_size in (1, 16):
        yield extend_variant(f"extend page {page_size}", hopper, heads, page_size)
    yield extend_variant("extend page 16, fp8", hopper, fp8, 16)
    yield extend_variant("extend window softcap head 256", hopper, large, 16, is_capped=True)


def _of_layers() -> Iterator[Variant]:
    constants = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "BLOCK_H": 32,
        "BLOCK_KV": 8,
        "HALF": 64,
        "BLOCK_HALF": 64,
    }
    for norms in (False, True):
        constants |= {"NORMS": norms, "ROTATES": True}
        name = "norm, rope and store" if norms else "rope and store"
        yield Variant(name, rope_kv_store._turn_and_store, constants, 4)
        yield Variant(f"{name}, fp8", rope_kv_store._turn_and_store, constants, 4, kinds=FP8_POOLS)
    for name in ("norm", "add and norm", "norm, add and norm"):
        constants = {"NUM_HEADS": 1, "SIZE": 4096, "BLOCK": 4096}
        constants |= {"ADDS": "add" in name, "NORMS_UPDATE": name.startswith("norm,")}
        yield Variant(name, rms_norm._norm_row, constants, 8)
    for width, warps in ((4096, 4), (14336, 8)):
        constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
        kinds = {"out": "*fp8e4nv", "scales": "*fp32"}
        yield Variant(f"rows of {width} to fp8", fp8_rows._quantize_row, constants, warps, kinds=kinds)
    constants = {"WIDTH": 4096, "HAS_BIAS": True, "BLOCK": fp8_rows.BLOCK}
    kinds = dict.fromkeys(("sums", "row_scale", "column_scale"), "*fp32")
    yield Variant("product scaled", fp8_rows._scale_row, constants, 4, kinds=kinds)
    for name in ("silu", "gelu", "gelu_pytorch_tanh"):
        gate = {"ACTIVATION": name, "WIDTH": 14336, "BLOCK": activation.BLOCK}
        yield Variant(f"gate, {name}", activation._gate, gate, 4)
    kinds = {"n": "i32", "scale": "fp32", "cap": "fp32"}
    for caps in (False, True):
        constants = {"CAPS": caps, "ADDS": not caps, "BLOCK": combine.BLOCK}
        name = "scale and cap" if caps else "scale and add"
        yield Variant(name, combine._combine, constants, 4, 3, kinds)


def _of_experts() -> Iterator[Variant]:
    """Yield the variants of Qwen3-30B-A3B's experts: 128 experts of 768, 8 for each token."""
    kinds = dict.fromkeys(("order", "ends", "tile_ends", "ids"), "*i32")
    kinds |= {"num_experts": "i32", "num_pairs": "i32"}
    constants = {"NUM_EXPERTS": 128, "PER_TOKEN": 8, "RENORMALIZES": True, "BLOCK_E": 128, "BLOCK_K": 8}
    yield Variant("experts: choice", expert_choice._choose, constants, 1, 3, kinds)
    for pairs in (128, 1024):
        constants = {"BLOCK_M": experts.SMALL_TILE, "BLOCK_E": 128, "BLOCK_P": pairs}
        yield Variant(f"experts: sort, blocks of {pairs}", experts._sort, constants, 4, 3, kinds)
    for rows in (experts.SMALL_TILE, experts.LARGE_TILE):
        for weighted, scaled in ((False, False), (True, False), (False, True), (True, True)):
            constants = {
                "WIDTH": 2048 if weighted else 1536,
                "DEPTH": 768 if weighted else 2048,
                "PER_TOKEN": 8,
                "WEIGHTED": weighted,
                "SCALED": scaled,
                "BLOCK_E": 128,
                "BLOCK_M": rows,
                "BLOCK_N": experts.BLOCK_N,
                "BLOCK_K": experts.BLOCK_K,
            }
            name = f"experts {'down' if weighted else 'gate and up'}, {rows} pairs{', fp8' * scaled}"
            stored = {"matrices": "*fp8e4nv" if scaled else "*bf16", "scales": "*fp32"}
            yield Variant(name, experts._grouped_product, constants, 4, 3, kinds | stored)


def _of_adapters() -> Iterator[Variant]:
    """Yield the variants of Llama-3.1-8B's gate and up, with at most 8 adapters of rank 64."""
    kinds = dict.fromkeys(("order", "ends", "tile_ends"), "*i32")
    kinds |= {"hidden": "*fp32", "modules": "*fp32", "num_tokens": "i32", "x_stride": "i32"}
    common = {"NUM_SLOTS": 8, "NUM_MODULES": 2, "ROOM": 64, "NUM_FIGURES": lora.NUM_FIGURES, "BLOCK_S": 8}
    for tokens, splits in ((experts.SMALL_TILE, lora.MAX_SPLITS), (experts.LARGE_TILE, 1)):
        constants = common | {"SPLITS": splits, "BLOCK_M": tokens, "BLOCK_R": lora.BLOCK_R}
        shrink = constants | {"DEPTH": 4096, "BLOCK_K": lora.BLOCK_K}
        expand = constants | {"WIDTH": 28672, "BLOCK_N": lora.BLOCK_N}
        yield Variant(f"adapters: shrink, {tokens} tokens", lora._shrink, shrink, 4, 3, kinds)
        yield Variant(f"adapters: expand, {tokens} tokens", lora._expand, expand, 4, 2, kinds)


def _of_a_step() -> Iterator[Variant]:
    yield from _of_a_draw()
    kinds = dict.fromkeys(("input_ids", "positions", "last_token", "entries", "pages", "lens"), "*i64")
    kinds |= {"n": "i32", "num_entries": "i32"}
    block = {"BLOCK": decode_inputs.BLOCK, "PAGE_SIZE": 16}
    yield Variant("lay out decodes", decode_inputs._lay_out, block, 4, 3, kinds)
    kinds = {"ids": "*i64", "first": "i32", "num_rows": "i32"}
    yield Variant("embedding", embedding._embed, {"WIDTH": 4096, "BLOCK": embedding.BLOCK}, 4, 3, kinds)
    kinds = dict.fromkeys(("inv_freq", "amplitude", "out"), "*fp32") | {"positions": "*i64"}
    constants = {"HALF": 64, "BLOCK": 64, "SCALES": True}
    yield Variant("rope: cosines and sines", rope._cos_sin, constants, 2, 3, kinds)


def _of_a_draw() -> Iterator[Variant]:
    """Yield the variants of a draw from 151,936 ids."""
    floats = ("logits", "temperatures", "top_ps", "min_logit_gaps", "sigmas", "highest", "lowest", "scores")
    integers = ("top_ks", "greedy", "seeds", "positions", "mass", "tokens", "last_token")
    small = ("histogram", "listed", "num_listed", "ids")
    kinds = dict.fromkeys(floats, "*fp32") | dict.fromkeys(integers, "*i64") | dict.fromkeys(small, "*i32")
    kinds |= {"vocab_size": "i32", "num_blocks": "i32", "moments": "*fp64"}
    block = {"BLOCK": draw.BLOCK}
    blocks = {**block, "BLOCKS": 128}
    yield Variant("draw: extremes", truncation._extremes, block, 4, 3, kinds)
    yield Variant("draw: count", truncation._count, blocks, 4, 3, kinds)
    whole, cut = ({"TRUNCATES": cuts, "CAPACITY": truncation.CAPACITY} for cuts in (False, True))
    yield Variant("draw: best in block", draw._best_in_block, whole | blocks, 8, 3, kinds)
    yield Variant("draw: best in block, truncated", draw._best_in_block, cut | blocks, 8, 3, kinds)
    of_row = {"REMEMBERS": True, "BLOCKS": 128, "TILE": draw.TILE, "ID_BITS": 18}
    yield Variant("draw: best of row", draw._best_of_row, whole | of_row, 1, 3, kinds)
    yield Variant("draw: best of row, truncated", draw._best_of_row, cut | of_row, 16, 3, kinds)


def _of_sampling() -> Iterator[Variant]:
    """Yield the variants of what rows may need besides a draw: edits of their logits, and logprobs."""
    columns = dict.fromkeys(("repetitions", "presences", "frequencies"), "*fp32")
    kinds = {"logits": "*fp32", "counts": "*i32", "tokens": "*i64", "vocab_size": "i32", **columns}
    yield Variant("penalize", logit_edits._penalize, {"BLOCK": logit_edits.BLOCK}, 4, 3, kinds)
    yield Variant("count", logit_edits._count, {}, 1, 3, kinds)
    masks = {"logits": "*fp32", "at": "*i32", "words": "*i32", "vocab_size": "i32", "num_words": "i32"}
    yield Variant("masks", logit_edits._forbid_masked, {"BLOCK": logit_edits.BLOCK}, 4, 3, masks)
    kinds |= {"table": "*i32", "positions": "*i64", "min_lens": "*i64", "width": "i32"}
    for forbids in (False, True):
        constants = {"FORBIDS": forbids, "BLOCK": logit_edits.LIST_BLOCK}
        yield Variant(
            "minimum length" if forbids else "bias", logit_edits._add_listed, constants, 1, 3, kinds
        )
    kinds = dict.fromkeys(("logits", "highest", "sums", "chosen", "top"), "*fp32")
    kinds |= {"keys": "*i64", "tokens": "*i64", "ids": "*i32"}
    kinds |= dict.fromkeys(("vocab_size", "num_blocks", "num_top"), "i32")
    constants = {"BLOCK": top_logprobs.BLOCK}
    yield Variant("logprobs: best of block", top_logprobs._best_of_block, constants, 8, 3, kinds)
    yield Variant("logprobs: merge", top_logprobs._merge, {"BLOCKS": 64, "KEYS": 1024}, 4, 3, kinds)


def _record(path: Path, table: dict[str, dict[str, int]]) -> None:
    """Write one line for each kernel, so that differences are readable."""
    records = json.loads(path.read_text()) if path.exists() else {}
    records[triton.__version__] = table
    versions = []
    for version, kernels in sorted(records.items()):
        lines = (f"  {json.dumps(name)}: {json.dumps(use)}" for name, use in kernels.items())
        versions.append(f" {json.dumps(version)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(versions) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--record", type=Path, help="file of records by compiler; changes this one's")
    arguments = parser.parse_args()
    table = {variant.name: compiled(variant, 90) for variant in variants()}
    if arguments.json:
        print(json.dumps({"triton": triton.__version__, "kernels": table}))
        return 0
    if arguments.record is not None:
        _record(arguments.record, table)
    print(f"triton {triton.__version__}, sm_90{'registers':>22}{'stack':>8}{'shared':>9}")
    for name, use in table.items():
        print(f"{name:<36}{use['registers']:>9}{use['stack']:>8}{use['shared']:>9}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
