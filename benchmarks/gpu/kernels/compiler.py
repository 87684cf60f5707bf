"""Triton's compiler without a GPU: the resources that a kernel needs on a device of some
compute capability.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTER_KINDS = {"rows": "*i64", "kv_lens": "*i64", "slots": "*i64", "page_table": "*i32"}
FP8_POOLS = dict.fromkeys(("k_pool", "v_pool"), "*fp8e4nv")
FLOAT32 = {"partial", "lse", "cos_sin"}
SCALARS = {
    **dict.fromkeys(("scale", "softcap", "v_scale", "k_inverse", "v_inverse", "eps"), "fp32"),
    **dict.fromkeys(("num_seqs", "num_splits", "first"), "i32"),
}


@dataclass(frozen=True)
class Variant:
    """Kernel with its constants, as a launch would specialise it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    kinds: dict[str, str] = field(default_factory=dict)


def compiled(variant: Variant, capability: int) -> dict[str, int]:
    """Return registers of a thread, and bytes of stack (spills) and of shared memory. capability: 90
    is 9.0.
    """
    return usage(binary_of(variant, capability))


def usage(binary: Any) -> dict[str, int]:
    return {**_usage_of(binary.asm["cubin"]), "shared": binary.metadata.shared}


def copies_pending(binary: Any) -> int:
    """Return the most groups of asynchronous copies that are on their way when the program waits for one. 0
    means that loads and arithmetic alternate.
    """
    return max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", binary.asm["ptx"])), default=0)


def binary_of(variant: Variant, capability: int) -> Any:
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
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


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
