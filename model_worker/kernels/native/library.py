"""NativeKernels: the compiled kernels as methods on tensors. Checks what C++ cannot; knows no layer.

torch is imported before the library is loaded, so that both share one OpenMP runtime and its threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from model_worker.kernels.native.build import BuildError, Target, build_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 16


class AttentionCall(ctypes.Structure):
    """Mirrors AttentionCall of attention_call.h, where the fields are described. Strides are in elements."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("k_pool", ctypes.c_void_p),
        ("v_pool", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("out_slots", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("page_table_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("force_float_math", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class LinearCall(ctypes.Structure):
    """Mirrors LinearCall of linear.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("out_is_float", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class NormCall(ctypes.Structure):
    """Mirrors NormCall of elementwise.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class GateCall(ctypes.Structure):
    """Mirrors GateCall of elementwise.cpp."""

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class NativeKernels:
    """One loaded library. A call's pointers must be into tensors on the CPU, of the layout that the C++ side
    says and of one dtype, float32 or bfloat16; they must stay alive while it runs.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.attention = _function(library, "carousel_attention", ctypes.POINTER(AttentionCall))
        self.rms_norm = _function(library, "carousel_rms_norm", ctypes.POINTER(NormCall))
        self.silu_and_mul = _function(library, "carousel_silu_and_mul", ctypes.POINTER(GateCall))
        library.carousel_packs_linear.restype = ctypes.c_int32
        self.packs_linear: bool = library.carousel_packs_linear() == 1
        if self.packs_linear:
            pointer, size, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
            self.linear = _function(library, "carousel_linear", ctypes.POINTER(LinearCall))
            self.pack_linear = _function(library, "carousel_pack_linear", pointer, size, size, count)
            self.packed_rows = _function(
                library, "carousel_packed_rows", pointer, size, pointer, size, pointer
            )


def _function(library: ctypes.CDLL, name: str, *argtypes: Any) -> Callable[..., None]:
    function = library[name]
    function.argtypes = argtypes
    function.restype = None
    return cast(Callable[..., None], function)


def attention_supports(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in DTYPES and head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM


def heads_pointer(x: Tensor, head_dim: int) -> int:
    """The address of x [T, heads, head_dim] whose tokens may lie apart, but whose heads must not."""
    assert x.stride()[1:] == (head_dim, 1)
    return x.data_ptr()


@cache
def load_kernels(cache_dir: Path, target: Target = "native") -> NativeKernels:
    """Build the library if need be and load it, once per process. Raises BuildError."""
    path = build_library(cache_dir, target)
    try:
        return NativeKernels(path)
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
