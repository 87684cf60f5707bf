"""Variants of kernels: Triton compiles a kernel again for each combination of what it specialises on.

`pytest tests/gpu --pretend --variants=FILE` writes those that the tests launch; `variants_of` returns those
that a server launches until it is ready; `prepare` compiles them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.decode_rows import PAGE_SIZE, pages_for
from benchmarks.gpu.fake_driver import FakeDriver
from benchmarks.gpu.kernels.launches import CountingDevice, model_of
from model_worker.attention.triton import TritonAttention
from model_worker.device.cpu import Rerun
from model_worker.kernels.triton import decode_attention, extend_attention
from model_worker.kernels.triton.tiles import Gpu
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.ops.triton_ops import TritonOps
from model_worker.runner.build_runner import build_runner

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
    torch.float64: "fp64",
}
ALIGNMENT = 16
INT32 = range(-(1 << 31), 1 << 31)
OPTIONS = ("num_warps", "num_stages")
CONSTANT = "constexpr"


def variant_of(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return JSON that describes a kernel, interpreted or compiled, and everything on which its code for
    these arguments depends: types, constants, which integers are 1, and which integers and addresses are
    multiples of 16.
    """
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    said = getattr(kernel, "kwargs", None) or vars(kernel)  # of an interpreted kernel, or of a compiled one
    plain = set(said.get("do_not_specialize") or ())
    unaligned = plain | set(said.get("do_not_specialize_on_alignment") or ())
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
    """Return Triton's type of a value, and the number (value or address) that may be a multiple of 16."""
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


class _Compiler(FakeDriver):
    """Driver for any capability; 90 is 9.0."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_variant(variant: Mapping[str, Any], capability: int) -> None:
    """Compile a variant into Triton's cache, as a launch with such arguments would. Afterwards this process
    cannot launch kernels. Raises what the compiler raises.
    """
    kernel = getattr(importlib.import_module(variant["module"]), variant["kernel"])
    if not isinstance(driver._active, _Compiler):
        driver.set_active(_Compiler(capability))
    arguments = [_argument(*each) for each in variant["arguments"]]
    kernel.warmup(*arguments, grid=(1,), **variant["options"])


def _argument(kind: str, value: Any, is_aligned: bool) -> Any:
    """Return an argument for which `_kind` returns these values."""
    if kind == CONSTANT:
        return value
    if kind.startswith("*"):
        # Only the address is examined: 0, or that of the second element.
        dtype = next(dtype for dtype, name in TYPES.items() if name == kind[1:])
        return torch.empty(2, dtype=dtype, device="meta")[0 if is_aligned else 1 :]
    number = ALIGNMENT if is_aligned else 3
    return {"i1": True, "fp32": 0.5, "i32": number, "i64": number + INT32.stop}[kind]


@dataclass(frozen=True)
class Runner:
    """Runner of a model in `shapes`, as far as its kernels depend on it."""

    name: str
    dtype: torch.dtype
    max_rows: int
    max_len: int
    max_tokens: int = 0
    graph_sizes: tuple[int, ...] = ()


def decode_runner(name: str, dtype: torch.dtype, batch: int, context: int) -> Runner:
    """Return the runner of benchmarks.gpu.kernels.decode_steps.DecodeSteps."""
    return Runner(name, dtype, batch, pages_for(context) * PAGE_SIZE, graph_sizes=(batch,))


def variants_of(runner: Runner, gpu: Gpu, num_multiprocessors: int) -> list[str]:
    """Return what a runner launches until it is ready, which is everything that it ever launches. Determined
    in seconds over tensors that have a shape but no memory.
    """
    found: dict[str, None] = {}

    def note(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: found.setdefault(variant_of(kernel, args, kwargs))

    from triton.runtime.jit import KernelInterface

    with ExitStack() as stack:
        stack.enter_context(patch.object(KernelInterface, "__getitem__", note))
        for module in (decode_attention, extend_attention):
            stack.enter_context(patch.object(module, "gpu_of", lambda device: gpu))
        stack.enter_context(torch.inference_mode())
        device = _NoDevice()
        ops = TritonOps(TritonAttention(num_multiprocessors))
        model = model_of(runner.name, device, ops, runner.dtype)
        layout = model.kv_layout
        pool = MHATokenToKVPool(
            pages_for(runner.max_len),
            PAGE_SIZE,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            runner.dtype,
            device.torch_device,
        )
        build_runner(
            model,
            pool,
            ops,
            device,
            max_rows=runner.max_rows,
            max_len=runner.max_len,
            vocab_size=model.config.vocab_size,
            max_tokens=runner.max_tokens,
            graph_sizes=runner.graph_sizes,
        ).warm_up()
    return list(found)


class _NoDevice(CountingDevice):
    """Device on which recording means launching once."""

    def capture(self, fn: Callable[[], None]) -> Rerun:
        fn()
        return Rerun(fn)
