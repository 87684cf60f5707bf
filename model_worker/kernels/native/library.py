"""NativeKernels: compiled kernels as methods on tensors. It checks what C++ cannot check, and does not depend
on layers. The kernels have threads of their own (team.h), so a kernel never waits for a thread that another
process has displaced.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from model_worker.kernels.native.build import BuildError, build_library, trusted_cache
from model_worker.kernels.native.calls import (
    ADAPTER_STRUCTURES,
    STRUCTURES,
    ActivateCall,
    AttentionCall,
    CombineCall,
    ExchangeCall,
    ExpertsCall,
    LinearCall,
    LoraCall,
    NormCall,
    QuantizeCall,
    RotaryCall,
    SortRowsCall,
    SumCall,
    TakeCall,
)
from model_worker.kernels.native.huge_pages import HugePages
from model_worker.kernels.native.layouts import layout_check
from model_worker.kernels.native.sample_calls import DrawCall, LogprobsCall, MaskCall, PenaltyCall
from runtime.base.cpu_isa import CpuIsa

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16


class Condition(NamedTuple):
    """Condition for a recorded kernel to run in a step: the int32 at an address is 0, or is not."""

    address: int
    is_nonzero: bool


class Tape(Protocol):
    def note(self, function: int, call: ctypes.Structure, condition: Condition | None) -> None:
        """Record a call of a kernel (its address) with the present content of `call`, for each step or for
        those in which `condition` holds.
        """


class ThreadRecording(threading.local):
    """Recording of the calling thread. Kernels are shared by all threads of a process; another thread may
    compute, or make a recording of its own.
    """

    tape: Tape | None = None
    """While it is set, kernel calls are recorded there and nothing is computed."""
    condition: Condition | None = None


class AdapterKernels(NamedTuple):
    """Kernels of the library of adapters, which run on the threads of the main library."""

    sort_rows: Callable[[ctypes.Structure], None]
    lora: Callable[[ctypes.Structure], None]


class NativeKernels:
    """Kernels of one loaded library. Pointers in a call must refer to CPU tensors of the layout that the C++
    side describes and of one of DTYPES, which stay alive during the call.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype | None = None,
        build_adapters: Callable[[], AbstractContextManager[Path]] | None = None,
    ) -> None:
        """dtype: as in load_kernels, for which the library was built. build_adapters: returns the library of
        adapters in a context in which it can be loaded; None: there is none.
        """
        library = self._library = ctypes.CDLL(str(path))
        self._build_adapters = build_adapters
        self.name = path.stem
        self.dtype = dtype
        self.recording = ThreadRecording()
        self.weights = HugePages()
        self.attention = self._recordable(library, "carousel_attention", AttentionCall)
        self.norm = self._recordable(library, "carousel_norm", NormCall)
        self.activate = self._recordable(library, "carousel_activate", ActivateCall)
        self.combine = self._recordable(library, "carousel_combine", CombineCall)
        self.experts = self._recordable(library, "carousel_experts", ExpertsCall)
        self.take = self._recordable(library, "carousel_take", TakeCall)
        self.rotary = self._recordable(library, "carousel_rotary", RotaryCall)
        self.linear = self._recordable(library, "carousel_linear", LinearCall)
        self.quantize_rows = self._recordable(library, "carousel_quantize_rows", QuantizeCall)
        self.int8_linear = self._recordable(library, "carousel_int8_linear", LinearCall)
        pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.pack_panels = _function(library, "carousel_pack_panels", pointer, size, size, count, count)
        self.run_program = _function(library, "carousel_run_program", ctypes.c_void_p)
        self.run_step = _function(library, "carousel_run_step", ctypes.c_void_p)
        self.draw = _function(library, "carousel_draw", ctypes.POINTER(DrawCall))
        self.logprobs = _function(library, "carousel_logprobs", ctypes.POINTER(LogprobsCall))
        self.penalise = _function(library, "carousel_penalise", ctypes.POINTER(PenaltyCall))
        self.mask = _function(library, "carousel_mask", ctypes.POINTER(MaskCall))
        self.exchange = _function(library, "carousel_exchange", ctypes.POINTER(ExchangeCall))
        self.sum = _function(library, "carousel_sum", ctypes.POINTER(SumCall))

    @cached_property
    def adapters(self) -> AdapterKernels:
        """Kernels of LoRA adapters, compiled on first use. Raises BuildError."""
        assert self._build_adapters is not None, "loaded without them"
        with self._build_adapters() as path:
            library = ctypes.CDLL(str(path))
        borrow_team = _function(library, "carousel_borrow_team", ctypes.c_void_p)
        borrow_team(ctypes.cast(self._library["carousel_run_tasks"], ctypes.c_void_p))
        return AdapterKernels(
            self._recordable(library, "carousel_sort_rows", SortRowsCall),
            self._recordable(library, "carousel_lora", LoraCall),
        )

    def choose(
        self, number: Tensor, when_zero: Callable[[], object], otherwise: Callable[[], object]
    ) -> None:
        """Run one of two functions, which call kernels only, depending on an int32. A recording contains
        both, and checks the number in every step.
        """
        recording = self.recording
        if recording.tape is None:
            (otherwise if number.item() else when_zero)()
            return
        assert recording.condition is None, "a choice within a choice"
        try:
            for function, is_nonzero in ((when_zero, False), (otherwise, True)):
                recording.condition = Condition(number.data_ptr(), is_nonzero)
                function()
        finally:
            recording.condition = None

    def number_of(self, dtype: torch.dtype) -> int:
        """Return the number that stands for dtype in kernel calls."""
        assert dtype is torch.float32 or self.dtype in (None, dtype), f"compiled for {self.dtype} alone"
        return DTYPES[dtype]

    def _recordable(
        self, library: ctypes.CDLL, name: str, call_type: type[ctypes.Structure]
    ) -> Callable[[ctypes.Structure], None]:
        function = _function(library, name, ctypes.POINTER(call_type))
        address = ctypes.cast(library[name], ctypes.c_void_p).value
        assert address is not None
        recording = self.recording

        def run(call: ctypes.Structure) -> None:
            tape = recording.tape
            if tape is None:
                function(call)
            else:
                tape.note(address, call, recording.condition)

        return run


def _function(library: ctypes.CDLL, name: str, *argtypes: Any) -> Callable[..., None]:
    function = library[name]
    function.argtypes = argtypes
    function.restype = None
    return cast(Callable[..., None], function)


def attention_supports(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in DTYPES and head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM


def heads_pointer(x: Tensor, head_dim: int) -> int:
    """Return the address of x [T, heads, head_dim]. Tokens may have any stride, but heads must
    be adjacent.
    """
    assert x.stride()[1:] == (head_dim, 1)
    return x.data_ptr()


@cache
def load_kernels(
    cache_dir: Path, isa: CpuIsa | None = None, dtype: torch.dtype | None = None
) -> NativeKernels:
    """Build the library if necessary and load it, once in a process. isa: as in build_library, which may
    raise BuildError. dtype: only dtype besides float32 that the kernels are compiled for (attention: only
    this one); None: all. A library that was compiled for other structures than ours is never loaded.
    """
    defines = () if dtype is None else (f"CAROUSEL_DTYPE={DTYPES[dtype]}",)
    checks = {name: layout_check(name, structure) for name, structure in STRUCTURES.items()}
    own_checks = {name: check for name, check in checks.items() if name not in ADAPTER_STRUCTURES}

    @contextmanager
    def build_adapters() -> Iterator[Path]:
        adapter_checks = {name: checks[name] for name in sorted(ADAPTER_STRUCTURES)}
        with trusted_cache(cache_dir) as cache:
            yield build_library(cache, isa, defines=defines, checks=adapter_checks, part="adapters")

    with trusted_cache(cache_dir) as cache:
        path = build_library(cache, isa, defines=defines, checks=own_checks)
        try:
            return NativeKernels(path, dtype, build_adapters)
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
