"""Which machine code Triton compiles: a kernel anew for each combination of what it specialises on.

    pytest tests/gpu --pretend --variants=FILE         writes those that the tests launch
    python -m tests.pretended_gpu.variants FILE 90      compiles each for that capability, without a GPU

The second in a process of its own, because where kernels are interpreted they cannot be compiled.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
ALIGNMENT = 16
INT32 = range(-(1 << 31), 1 << 31)
OPTIONS = ("num_warps", "num_stages")
CONSTANT = "constexpr"


def variant_of(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """JSON of an interpreted kernel and of what its code for these arguments depends on, as Triton has it:
    types, constants, which integers are 1, and which integers and addresses are multiples of 16.
    """
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    plain = set(kernel.kwargs.get("do_not_specialize") or ())
    unaligned = plain | set(kernel.kwargs.get("do_not_specialize_on_alignment") or ())
    constants = {name for name, each in kernel.fn.__annotations__.items() if CONSTANT in str(each)}
    arguments = []
    for name in kernel.arg_names:
        value = given[name]
        if name in constants or value is None or (type(value) is int and value == 1 and name not in plain):
            arguments.append((CONSTANT, value, False))
        else:
            kind, number = _kind(value)
            arguments.append((kind, None, number % ALIGNMENT == 0 and name not in unaligned))
    options = {key: given[key] for key in OPTIONS if key in given}
    variant = {"module": kernel.fn.__module__, "kernel": kernel.__name__, "options": options}
    return json.dumps({**variant, "arguments": arguments})


def _kind(value: Any) -> tuple[str, int]:
    """Triton's type, and what of the value is, or is not, a multiple of 16."""
    match value:
        case Tensor():
            return f"*{TYPES[value.dtype]}", value.data_ptr()
        case bool():
            return "i1", 1
        case int():
            return ("i32" if value in INT32 else "i64"), value
        case float():
            return "fp32", 1
    raise TypeError(f"an argument that no kernel takes: {value!r}")


def compile_variant(variant: Mapping[str, Any], capability: int) -> None:
    """Raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(variant["module"]), variant["kernel"])
    arguments = list(enumerate(variant["arguments"]))
    source = ASTSource(
        kernel,
        {kernel.arg_names[i]: kind for i, (kind, _, _) in arguments},
        {(i,): value for i, (kind, value, _) in arguments if kind == CONSTANT},
        {(i,): [["tt.divisibility", ALIGNMENT]] for i, (_, _, is_aligned) in arguments if is_aligned},
    )
    triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant["options"])


def main() -> int:
    """0 when all compile."""
    variants = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    capability, failed = int(sys.argv[2]), 0
    for variant in variants:
        # Float8 is Ada's: nothing launches it on an older device.
        if capability < 89 and any("fp8" in kind for kind, *_ in variant["arguments"]):
            continue
        try:
            compile_variant(variant, capability)
        except Exception as error:  # whatever the compiler says, the others are tried, too
            failed += 1
            print(f"{json.dumps(variant)}\n    {type(error).__name__}: {error}")
    print(f"{len(variants)} variants, {failed} do not compile for capability {capability}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
