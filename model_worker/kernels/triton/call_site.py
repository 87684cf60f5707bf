"""Launches of a compiled kernel without what Triton does for each: it binds arguments by name, looks at every
one of them, and makes a key of text for the compiled code.

A launch with arguments of a new kind is Triton's own, and the compiled kernel is kept. Later ones of that
kind go straight to Triton's launcher. Everything that depends on Triton's internals is in this file. Where
they are not as expected, in its interpreter, and while hooks watch launches (a profiler), every launch is
Triton's own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.compiler.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""Alignment in bytes for which Triton compiles different code."""
TRITON_LAUNCHES = """
    kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,
               knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())
"""
"""Source of a launch in Triton 3.6, and in 3.9."""

_by_triton_alone = False


class CallSite:
    """A kernel with its constants and launch options; `launch` launches it. Triton's environment variables,
    such as TRITON_DEBUG, are read when a kind of arguments is new.
    """

    launch: Callable[..., None]
    """Function launch(grid, *arguments). grid has three sizes. arguments are those before the kernel's
    constants; each must always be a tensor or always a number. Code is compiled for every value of an int, so
    ints should come from the model's shape or the settings, or be in the kernel's do_not_specialize.
    """

    def __init__(self, kernel: Any, **constants_and_options: Any) -> None:
        self._kernel = kernel
        self._constants_and_options = constants_and_options
        self._kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.launch = self._launch_first

    def _launch_first(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        compiled = self._kernel[grid](*arguments, **self._constants_and_options)
        # A kernel that is interpreted gives nothing back.
        if isinstance(compiled, CompiledKernel) and _is_as_expected(compiled.metadata.target):
            self.launch = self._quick_launch(arguments)

    def _launch_new(self, key: tuple[Any, ...], grid: tuple[int, int, int], *arguments: Any) -> None:
        compiled = self._kernel[grid](*arguments, **self._constants_and_options)
        if isinstance(compiled, CompiledKernel):
            # The compiled kernel itself, because its code is unloaded with the last reference to it.
            self._kept[key] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)

    def _quick_launch(self, arguments: Sequence[Any]) -> Callable[..., None]:
        """Return a `launch` function for arguments like these. Its source code is generated for them, as
        Triton's binder is, because loops over arguments would take twice as long.
        """
        names = self._kernel.arg_names
        given = ", ".join(f"a{i}" for i in range(len(arguments)))
        constants = {
            f"c{i}": self._constants_and_options[names[i]] for i in range(len(arguments), len(names))
        }
        unspecialised = [parameter.do_not_specialize for parameter in self._kernel.params]
        source = f"""
def launch(grid, {given}):
    active = driver.active
    device = active.get_current_device()
    key = (device, {", ".join(_facts(arguments, unspecialised))})
    kept = find(key)
    if kept is None or is_watched(kernel):
        return launch_new(key, grid, {given})
    run, function, metadata, _ = kept
    x, y, z = grid
    stream = active.get_current_stream(device)
    run(x, y, z, stream, function, metadata, None, None, None, {", ".join([given, *constants])})
"""
        scope: dict[str, Any] = {
            "driver": driver,
            "find": self._kept.get,
            "is_watched": _is_watched,
            "kernel": self._kernel,
            "launch_new": self._launch_new,
            **constants,
        }
        exec(source, scope)
        launch: Callable[..., None] = scope["launch"]
        return launch


@contextmanager
def launches_by_triton_alone() -> Iterator[None]:
    """Every launch is Triton's own, so that it can be counted, or timed."""
    global _by_triton_alone
    before, _by_triton_alone = _by_triton_alone, True
    try:
        yield
    finally:
        _by_triton_alone = before


def _is_watched(kernel: JITFunction[Any]) -> bool:
    """Return True if Triton would call hooks for a launch of this kernel."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or _by_triton_alone
    )


def _facts(arguments: Sequence[Any], unspecialised: Sequence[bool]) -> Iterator[str]:
    """Yield source expressions for every property of the arguments a0, a1, ... on which Triton's compiled
    code depends: dtypes and alignment, types, values of ints, and for an unspecialised int whether it fits 32
    bits.
    """
    tensors = [f"a{i}" for i, each in enumerate(arguments) if isinstance(each, Tensor)]
    yield from (f"{each}.dtype" for each in tensors)
    past = [f"{each}.data_ptr() % {ALIGNMENT}" for each in tensors]
    # One value when all are aligned, as they nearly always are.
    yield f"({' or '.join(past)}) and ({', '.join(f'{each} == 0' for each in past)},)"
    for i, each in enumerate(arguments):
        if isinstance(each, float):
            yield f"a{i}.__class__ is not float and (a{i}.__class__, a{i})"
        elif not isinstance(each, Tensor):
            # Python's 1 equals its True and its 1.0, for which Triton makes different code.
            value = f"a{i} >> 31" if unspecialised[i] else f"a{i}"
            yield f"{value} if a{i}.__class__ is int else (a{i}.__class__, a{i})"


@cache
def _is_as_expected(target: Any) -> bool:
    """Return True if this version of Triton launches and specialises on the target as assumed here; log it if
    not.
    """
    try:
        source = "".join(inspect.getsource(JITFunction.run).split())
        is_known = (
            target.backend == "cuda"
            and "".join(TRITON_LAUNCHES.split()) in source
            and _looks_at_addresses_as_here(target)
        )
    except (OSError, AttributeError, TypeError, ValueError):
        is_known = False
    if not is_known:
        logger.warning(
            "kernels are launched by Triton alone, which takes the host about four times as long: the "
            "internals of this release are not those of 3.6 or 3.9"
        )
    return is_known


def _looks_at_addresses_as_here(target: Any) -> bool:
    """Return True if Triton's code depends on a tensor's address, or length, only by ALIGNMENT."""
    backend = make_backend(target)
    memory = torch.empty(512, dtype=torch.uint8)
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for offset in range(256):
        tensor = memory[offset:]
        kind = repr(native_specialize_impl(backend, tensor, False, True, True))
        kinds[tensor.data_ptr() % ALIGNMENT == 0].add(kind)
    return all(len(each) == 1 for each in kinds.values())
