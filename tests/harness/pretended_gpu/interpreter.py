"""Triton's interpreter with the arithmetic of a GPU, and with programs in any order.

The interpreter stores bfloat16 and float8 as integers: it multiplies them as such, and truncates where a GPU
rounds. It warns about an undefined result, where a GPU gives NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.harness.pretended_gpu.remembered import remembered

# Triton's type by name → torch's, and the integer that numpy has in its place.
TYPES = {
    "bf16": (torch.bfloat16, np.uint16, torch.uint16),
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8, torch.uint8),
    "fp16": (torch.float16, np.uint16, torch.uint16),
    "fp32": (torch.float32, np.uint32, torch.uint32),
    "fp64": (torch.float64, np.uint64, torch.uint64),
}


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Convert as Triton's function of that name does: to integers as wide as the target, same shape."""
    if source.name == "bf16" and target.name == "fp32":
        return np.left_shift(values, 16, dtype=np.uint32)
    if source.name == "fp32" and target.name == "bf16":
        return _rounded(np.ascontiguousarray(values).view(np.uint32)).reshape(np.shape(values))
    source_type, source_bits, _ = TYPES[source.name]
    target_type, _, target_bits = TYPES[target.name]
    with _disable_current_modes():  # no dispatch mode is to see it
        of = torch.from_numpy(np.ascontiguousarray(values).view(source_bits)).view(source_type)
        return of.to(target_type).view(target_bits).numpy().reshape(np.shape(values))


def _rounded(bits: Any) -> Any:
    """Floats as bfloat16, to the nearest or, of two, the even one: as torch does it, without torch."""
    result = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, np.uint16(0x7FFF), result) if is_nan.any() else result


def _wide(handle: Any) -> Any:
    """A handle of bfloat16 as float32; any other as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(
        _convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
    )


@contextmanager
def patched_once() -> Iterator[None]:
    """Triton replaces its language by the interpreter's for a launch, and once more for each call of a device
    function within it, which was a third of the tests' time and changes nothing.
    """
    plain = interpreter._patch_lang
    everything = SimpleNamespace(
        __globals__={"tl": tl, "core": tl.core}
    )  # kernels see one, Triton's own the other
    in_launch = False
    replaced: list[tuple[Any, str, Any]] = []

    def patch_lang(fn: Any) -> Any:
        nonlocal in_launch
        if in_launch:
            return None  # a device function's caller does not look at it
        if replaced:  # by the first launch, which had to look for it
            scope = interpreter._LangPatchScope()
            for change in replaced:
                scope.set_attr(*change)
        else:
            scope = plain(everything)
            names = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
            replaced.extend((owner, name, getattr(owner, name)) for owner, name in names.values())
        in_launch, restore = True, scope.restore

        def end() -> None:
            nonlocal in_launch
            in_launch = False
            restore()

        scope.restore = end
        return scope

    with patch.object(interpreter, "_patch_lang", patch_lang), _indexes_of_one_element(), remembered():
        yield


@contextmanager
def _indexes_of_one_element() -> Iterator[None]:
    """Let a block of one element be an index, such as the bound of a loop.

    Triton 3.6 asks numpy for the scalar of an array of one dimension, which numpy 2.4 refuses.
    """
    plain = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with patch.object(interpreter, "_patch_lang_tensor", patch_tensor):
        yield


SET_GRID_IDX = InterpreterBuilder.set_grid_idx


@lru_cache
def _shuffled(grid: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """Programs of a launch: always the same order of the same grid, so that a failure comes again."""
    in_order = list(product(*map(range, grid)))
    programs = in_order.copy()
    Random(str(grid)).shuffle(programs)
    return programs if programs != in_order else programs[::-1]


def _set_shuffled_idx(builder: Any, x: int, y: int, z: int) -> None:
    _, ny, nz = grid = builder.grid_dim
    SET_GRID_IDX(builder, *_shuffled(grid)[(x * ny + y) * nz + z])


@contextmanager
def shuffled_programs() -> Iterator[None]:
    """A GPU promises no order of a launch's programs, and the interpreter keeps to none."""
    with patch.object(InterpreterBuilder, "set_grid_idx", _set_shuffled_idx):
        yield


@contextmanager
def gpu_arithmetic() -> Iterator[None]:
    plain_dot, plain_binary = InterpreterBuilder.create_dot, InterpreterBuilder.binary_op

    def dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return plain_dot(self, _wide(a), _wide(b), d, *rest)

    def binary(self: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return plain_binary(self, left, right, operation)
        result = plain_binary(self, _wide(left), _wide(right), operation)
        return self.cast_impl(result, tl.bfloat16) if result.dtype.scalar == tl.float32 else result

    with ExitStack() as stack, np.errstate(all="ignore"):
        stack.enter_context(patched_once())
        stack.enter_context(shuffled_programs())
        stack.enter_context(patch.object(interpreter, "_convert_float", _convert_float))
        stack.enter_context(patch.object(InterpreterBuilder, "create_dot", dot))
        stack.enter_context(patch.object(InterpreterBuilder, "binary_op", binary))
        yield
