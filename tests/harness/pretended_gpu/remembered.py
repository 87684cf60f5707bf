"""Cache of work that Triton's interpreter repeats for each operation of each program.

Most of its time goes into types: it makes them again, with their names and checks, for each of millions of
results. Here results that depend only on types are cached by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _by_name(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace a function of one type."""
    known: dict[str, Any] = {}

    def remembered(of: Any) -> Any:
        result = known.get(of.name)
        if result is None:
            result = known[of.name] = plain(of)
        return result

    return remembered


def _block_type(plain: Callable[..., None]) -> Callable[..., None]:
    """Replace block_type.__init__."""
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}  # one object for each, so that they can be compared at a glance

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if not all(type(each) is int for each in sizes):
            plain(self, element_ty, shape)
            return
        key = element_ty.name, sizes
        if key not in known:
            plain(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])
        self.element_ty = element_ty

    return init


def _tensor(plain: Callable[..., None]) -> Callable[..., None]:
    """Replace tensor.__init__. Nobody changes a tensor's shape."""
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        name = type.name
        if name not in known:
            plain(self, handle, type)
            known[name] = dict(vars(self), handle=None)
        vars(self).update(known[name])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def _to_ir(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace block_type.to_ir: the interpreter has types of Triton for those of the compiler."""
    known: dict[str, Any] = {}

    def to_ir(self: Any, builder: Any) -> Any:
        if self.element_ty.is_ptr() or not isinstance(builder, interpreter.InterpreterBuilder):
            return plain(self, builder)
        if self.name not in known:
            known[self.name] = plain(self, builder)
        return known[self.name]

    return to_ir


def _with_element_ty(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace block_type.with_element_ty."""
    known: dict[Any, Any] = {}

    def with_element_ty(self: Any, scalar: Any) -> Any:
        if scalar.is_ptr():  # its name does not say all
            return plain(self, scalar)
        key = self.name, scalar.name
        if key not in known:
            known[key] = plain(self, scalar)
        return known[key]

    return with_element_ty


def _equal(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Replace dtype.__eq__."""
    return lambda self, other: self is other or plain(self, other)


def _computation_type(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace TritonSemantic.computation_type_impl."""
    known: dict[Any, Any] = {}

    def computation_type(
        self: Any, a: Any, a_is_scalar: Any, b: Any, b_is_scalar: Any, div_or_mod: Any
    ) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in known:
            known[key] = plain(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return known[key]

    return computation_type


_is_for_numpy = False
"""True while operands of a function of numpy are broadcast, which repeats scalars by itself."""


def _joined() -> Callable[[Any, Any], Any]:
    """Return a function of two shapes: the one that both are broadcast to; None where they do not match."""
    # With the shapes themselves, so that no other gets their place in memory.
    known: dict[tuple[int, int], tuple[Any, Any, list[int] | None]] = {}

    def joined(a: Any, b: Any) -> list[int] | None:
        key = id(a), id(b)
        if key not in known:
            try:
                shape = list(np.broadcast_shapes(tuple(a), tuple(b)))
            except ValueError:
                shape = None
            known[key] = a, b, shape
        return known[key][2]

    return joined


def _broadcast(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace TritonSemantic.broadcast_impl_value."""
    joined = _joined()

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        is_block = a.is_block()
        if is_block == b.is_block():
            if not is_block or a.shape is b.shape:
                return left, right
            if _is_for_numpy and (shape := joined(a.shape, b.shape)) is not None:
                return (
                    tl.tensor(left.handle, tl.block_type(a.element_ty, shape)),
                    tl.tensor(right.handle, tl.block_type(b.element_ty, shape)),
                )
        elif _is_for_numpy and is_block:
            return left, tl.tensor(right.handle, a.with_element_ty(b))
        elif _is_for_numpy:
            return tl.tensor(left.handle, b.with_element_ty(a)), right
        return plain(self, left, right)

    return broadcast


def _operands(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace TritonSemantic.binary_op_type_checking_impl, of whose results numpy makes one."""
    results: dict[Any, Any] = {}

    def computed_in(self: Any, a: Any, b: Any, div_or_mod: bool) -> Any:
        """The type of a result of two types; None: one is a pointer."""
        key = a.name, b.name, div_or_mod
        if key not in results:
            has_pointer = a.is_ptr() or b.is_ptr()
            results[key] = None if has_pointer else self.computation_type_impl(a, False, b, False, div_or_mod)
        return results[key]

    scalars: dict[Any, Any] = {}

    def beside(self: Any, tensor: Any, value: Any, is_left: bool, div_or_mod: bool) -> Any:
        """The number as a tensor of the other operand's type; None: it is computed in another one."""
        of = tensor.dtype
        key = of.name, type(value), value, is_left, div_or_mod
        if key not in scalars:
            scalars[key] = None
            if not of.is_ptr() and (value or type(value) is int):  # zeros of floats differ in their sign
                pair = (value, tensor) if is_left else (tensor, value)
                left, right = plain(self, *pair, False, False, True, div_or_mod)
                number, other = (left, right) if is_left else (right, left)
                if other.handle is tensor.handle and number.dtype is of:
                    scalars[key] = self.scalar_constant(value, of)
        return scalars[key]

    def operands(
        self: Any,
        left: Any,
        right: Any,
        allow_left_ptr: bool = False,
        allow_right_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        global _is_for_numpy
        rest = allow_left_ptr, allow_right_ptr, arithmetic_check, div_or_mod
        if self.builder is not interpreter.interpreter_builder:
            return plain(self, left, right, *rest)
        _is_for_numpy = True
        try:
            if not arithmetic_check:
                return plain(self, left, right, *rest)
            kinds = type(left), type(right)
            if kinds == (tl.tensor, tl.tensor):
                a, b = left.dtype, right.dtype
                result = computed_in(self, a, b, div_or_mod)
                if result is not None:
                    left = left if a is result else self.cast(left, result)
                    right = right if b is result else self.cast(right, result)
                    return self.broadcast_impl_value(left, right)
                if allow_left_ptr and b.is_int():
                    return self.broadcast_impl_value(left, right)
            elif kinds in NUMBER_RIGHT:
                number = beside(self, left, right, False, div_or_mod)
                if number is not None:
                    return self.broadcast_impl_value(left, number)
            elif kinds in NUMBER_LEFT:
                number = beside(self, right, left, True, div_or_mod)
                if number is not None:
                    return self.broadcast_impl_value(number, right)
            return plain(self, left, right, *rest)
        finally:
            _is_for_numpy = False

    return operands


NUMBER_RIGHT = {(tl.tensor, int), (tl.tensor, float)}
NUMBER_LEFT = {(int, tl.tensor), (float, tl.tensor)}


def _unwrapped(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace the language's _unwrap_if_constexpr."""
    simple = {tl.tensor, int, float, bool, type(None)}
    return lambda value: value if type(value) in simple else plain(value)


def _fits(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Replace the interpreter's _validate_np_data_size, which takes an array and a type."""
    known: dict[Any, bool] = {}

    def fits(array: Any, of: Any) -> bool:
        key = array.itemsize, of.name
        if key not in known:
            known[key] = plain(array, of)
        return known[key]

    return fits


def _constant(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace TritonSemantic.scalar_constant. Nobody changes a constant."""
    known: dict[Any, Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        kind = type(value)
        if self.builder is not interpreter.interpreter_builder or not (
            kind is int or (kind is float and value)
        ):
            return plain(self, value, dtype)  # zeros of floats may differ in their sign
        key = kind, value, dtype.name
        if key not in known:
            known[key] = plain(self, value, dtype)
        return known[key]

    return constant


def _handle(plain: Callable[..., None]) -> Callable[..., None]:
    """Replace TensorHandle.__init__, which compares numpy's width with the type's each time."""

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return init


CHECKS_SEMANTIC = tl.core.builtin(lambda: None).__code__


def _patch_attr(plain: Callable[..., None]) -> Callable[..., None]:
    """Replace the interpreter's _patch_attr. The wrapper of each function of Triton's language, which says
    that it is called outside of a kernel, is left out inside of one, and no keywords are sorted out for each
    call.
    """
    semantic = interpreter.interpreter_semantic

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        while getattr(member, "__code__", None) is CHECKS_SEMANTIC:
            member = member.__wrapped__

        def in_kernel(*args: Any, **keywords: Any) -> Any:
            keywords["_semantic"] = semantic
            return member(*args, **keywords)

        scope.set_attr(owner, name, in_kernel)

    return patch_attr


REPLACED: list[tuple[Any, str, Callable[..., Any]]] = [
    (interpreter, "_get_np_dtype", _by_name),
    (tl.block_type, "__init__", _block_type),
    (tl.block_type, "to_ir", _to_ir),
    (tl.block_type, "with_element_ty", _with_element_ty),
    (interpreter, "_patch_attr", _patch_attr),
    (tl.tensor, "__init__", _tensor),
    (interpreter.TensorHandle, "__init__", _handle),
    (tl.dtype, "__eq__", _equal),
    (TritonSemantic, "computation_type_impl", _computation_type),
    (TritonSemantic, "broadcast_impl_value", _broadcast),
    (TritonSemantic, "binary_op_type_checking_impl", _operands),
    (TritonSemantic, "scalar_constant", _constant),
    (tl.core, "_unwrap_if_constexpr", _unwrapped),
    (interpreter, "_validate_np_data_size", _fits),
]
_is_remembering = False


@contextmanager
def remembered() -> Iterator[None]:
    """Once, if it is entered again inside itself."""
    global _is_remembering
    if _is_remembering:
        yield
        return
    builder = interpreter.interpreter_builder
    with ExitStack() as stack:
        # Seven operations for one of integers, whose result nobody looks at where nothing is debugged.
        options = replace(builder.options, sanitize_overflow=builder.options.debug)
        stack.enter_context(patch.object(builder, "options", options))
        for owner, name, make in REPLACED:
            stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))
        _is_remembering = True
        try:
            yield
        finally:
            _is_remembering = False
