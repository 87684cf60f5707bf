"""Which machine code Triton would compile: a kernel anew for each combination of what it specialises on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

ALIGNMENT = 16
INT32 = range(-(1 << 31), 1 << 31)


def variant_of(kernel: InterpretedFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The kernel's name and what its code for these arguments would depend on, as Triton's cache has it:
    dtypes, constants, which integers are 1, and which integers and addresses are multiples of 16.
    """
    named = dict(zip(kernel.arg_names, args, strict=False), **kwargs)
    plain = set(kernel.kwargs.get("do_not_specialize") or ())
    unaligned = set(kernel.kwargs.get("do_not_specialize_on_alignment") or ())
    constants = {name for name, each in kernel.fn.__annotations__.items() if "constexpr" in str(each)}
    parts = []
    for name, value in named.items():
        if name in constants or name not in kernel.arg_names or value is None:
            parts.append(f"{name}={value}")
            continue
        kind, number = _kind(value)
        if isinstance(value, int) and value == 1 and name not in plain:
            kind = "1"
        elif number % ALIGNMENT == 0 and name not in plain | unaligned:
            kind += "*16"
        parts.append(f"{name}: {kind}")
    return f"{kernel.__name__}({', '.join(parts)})"


def _kind(value: Any) -> tuple[str, int]:
    """Its type, and what of it is, or is not, a multiple of 16."""
    if isinstance(value, Tensor):
        return f"{value.dtype}".removeprefix("torch."), value.data_ptr()
    if isinstance(value, bool | float):
        return type(value).__name__, 1
    return ("int32" if value in INT32 else "int64"), value
