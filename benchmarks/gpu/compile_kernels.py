"""Compile every Triton kernel for Hopper (sm_90) without a GPU, and say what the code needs.

    python -m benchmarks.gpu.compile_kernels            # a table
    python -m benchmarks.gpu.compile_kernels --json     # for the test that compares
    python -m benchmarks.gpu.compile_kernels --record tests/cpu/triton/sm90.json    # this compiler's, anew

A spill (local memory) in an inner loop costs more than any other mistake in these kernels, and the registers
bound how many programs a multiprocessor runs; neither needs a GPU to be seen.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_worker.kernels.triton import (
    decode_attention,
    decode_inputs,
    draw,
    expert_choice,
    experts,
    extend_attention,
    fp8_rows,
    logit_edits,
    rms_norm,
    rope,
    rope_kv_store,
    silu_and_mul,
    top_logprobs,
)

TARGET = GPUTarget("cuda", 90, 32)
POINTER_KINDS = {"rows": "*i64", "kv_lens": "*i64", "slots": "*i64", "page_table": "*i32", "tiles": "*i32"}
FP8_POOLS = dict.fromkeys(("k_pool", "v_pool"), "*fp8e4nv")
FLOAT32 = {"partial", "lse", "cos_sin"}
SCALARS = {"scale": "fp32", "softcap": "fp32", "eps": "fp32"}


@dataclass(frozen=True)
class Variant:
    """One kernel with its constants, as a launch would specialise it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    kinds: dict[str, str] = field(default_factory=dict)


def variants() -> Iterator[Variant]:
    """What Llama-3.1-8B (heads of 128, groups of 4) and Qwen3-0.6B (groups of 2) launch."""
    yield from _of_attention()
    yield from _of_layers()
    yield from _of_experts()
    yield from _of_a_step()
    yield from _of_sampling()


def _of_attention() -> Iterator[Variant]:
    decode = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 64, "HAS_WINDOW": False, "HAS_SOFTCAP": False}
    for page_size in (1, 16):
        for splits in (1, 8):
            constants = {
                **decode,
                "NUM_SPLITS": splits,
                "GROUP": 4,
                "BLOCK_G": 16,
                "PAGE_SIZE": page_size,
            }
            name = f"decode page {page_size} splits {splits}"
            yield Variant(name, decode_attention._attend_split, constants, 4)
            if page_size > 1:
                yield Variant(f"{name}, fp8", decode_attention._attend_split, constants, 4, 3, FP8_POOLS)
    window = {**decode, "HAS_WINDOW": True, "HAS_SOFTCAP": True, "HEAD_DIM": 256, "BLOCK_D": 256}
    yield Variant(
        "decode window softcap head 256",
        decode_attention._attend_split,
        {**window, "NUM_SPLITS": 8, "GROUP": 2, "BLOCK_G": 16, "PAGE_SIZE": 16},
        4,
    )
    yield Variant(
        "merge",
        decode_attention._merge_splits,
        {"NUM_SPLITS": 8, "BLOCK_S": 8, "HEAD_DIM": 128, "BLOCK_D": 128},
        1,
    )
    for page_size in (1, 16):
        constants = {**decode, "GROUP": 4, "PAGE_SIZE": page_size, "BLOCK_M": extend_attention.BLOCK_M}
        constants["BLOCK_N"] = extend_attention.BLOCK_N
        kinds = {"kv_lens": "*i32", "query_start": "*i32"}
        yield Variant(f"extend page {page_size}", extend_attention._attend_tile, constants, 4, 2, kinds)
    kinds |= FP8_POOLS
    yield Variant("extend page 16, fp8", extend_attention._attend_tile, constants, 4, 2, kinds)


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
    for adds in (False, True):
        constants = {"NUM_HEADS": 1, "SIZE": 4096, "BLOCK": 4096, "ADDS": adds}
        yield Variant("add and norm" if adds else "norm", rms_norm._norm_row, constants, 8)
    for width, warps in ((4096, 4), (14336, 8)):
        constants = {"WIDTH": width, "BLOCK": triton.next_power_of_2(width)}
        kinds = {"out": "*fp8e4nv", "scales": "*fp32"}
        yield Variant(f"rows of {width} to fp8", fp8_rows._quantize_row, constants, warps, kinds=kinds)
    yield Variant("silu and mul", silu_and_mul._gate, {"WIDTH": 14336, "BLOCK": 1024}, 4)


def _of_experts() -> Iterator[Variant]:
    """Qwen3-30B-A3B: 128 experts of 768, 8 a token."""
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


def _of_a_step() -> Iterator[Variant]:
    kinds = dict.fromkeys(("logits", "temperatures", "top_ps", "min_logit_gaps", "lowest", "scores"), "*fp32")
    kinds |= dict.fromkeys(("seeds", "positions", "top_ks", "tokens"), "*i64")
    kinds |= {"cut": "*i32", "ids": "*i32", "greedy": "*i64", "vocab_size": "i32", "num_blocks": "i32"}
    block = {"BLOCK": draw.BLOCK}
    yield Variant("draw: cut", draw._cut, block, 16, 3, kinds)
    for truncates in (False, True):
        name = "draw: best in block" + (", truncated" if truncates else "")
        yield Variant(name, draw._best_in_block, {**block, "TRUNCATES": truncates}, 4, 3, kinds)
    yield Variant("draw: best of blocks", draw._best_of_blocks, {"BLOCK": 128}, 1, 3, kinds)
    kinds = dict.fromkeys(("input_ids", "positions", "last_token", "entries", "pages", "lens"), "*i64")
    kinds |= {"n": "i32", "num_entries": "i32"}
    block = {"BLOCK": decode_inputs.BLOCK, "PAGE_SIZE": 16}
    yield Variant("lay out decodes", decode_inputs._lay_out, block, 4, 3, kinds)
    kinds = dict.fromkeys(("inv_freq", "amplitude", "out"), "*fp32") | {"positions": "*i64"}
    constants = {"HALF": 64, "BLOCK": 64, "SCALES": True}
    yield Variant("rope: cosines and sines", rope._cos_sin, constants, 2, 3, kinds)


def _of_sampling() -> Iterator[Variant]:
    """What rows ask for beside a draw: edits of their logits, and logprobs."""
    columns = dict.fromkeys(("repetitions", "presences", "frequencies"), "*fp32")
    kinds = {"logits": "*fp32", "counts": "*i32", "tokens": "*i64", "vocab_size": "i32", **columns}
    yield Variant("penalize", logit_edits._penalize, {"BLOCK": logit_edits.BLOCK}, 4, 3, kinds)
    yield Variant("count", logit_edits._count, {}, 1, 3, kinds)
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


def compiled(variant: Variant) -> dict[str, int]:
    """Registers a thread, bytes of stack (spills) and of shared memory."""
    kernel = variant.kernel
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], list[list[Any]]] = {}
    for position, name in enumerate(kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        kind = variant.kinds.get(name) or _kind_of(name)
        signature[name] = kind
        if kind.startswith("*") or name.endswith("stride"):
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(k),): value for k, value in variant.constants.items()},
        attrs=aligned,
    )
    binary = triton.compile(
        source, target=TARGET, options={"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    )
    return {**_usage_of(binary.asm["cubin"]), "shared": binary.metadata.shared}


def _kind_of(name: str) -> str:
    if name in POINTER_KINDS:
        return POINTER_KINDS[name]
    if name in SCALARS:
        return SCALARS[name]
    if name.endswith("stride") or name == "window":
        return "i32"
    return "*fp32" if name in FLOAT32 else "*bf16"


def _usage_of(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    numbers = re.search(r"REG:(\d+).*?STACK:(\d+)", listing.stdout + listing.stderr)
    assert numbers is not None, listing.stdout
    return {"registers": int(numbers[1]), "stack": int(numbers[2])}


def _record(path: Path, table: dict[str, dict[str, int]]) -> None:
    """One line a kernel, so that a difference can be read."""
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
    table = {variant.name: compiled(variant) for variant in variants()}
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
