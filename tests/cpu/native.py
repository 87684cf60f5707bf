"""The C++ kernels for tests, from the user's own cache, where the first test to want them builds them."""

from __future__ import annotations

import shutil

import pytest

from model_worker.kernels.native.build import COMPILERS, Target
from model_worker.kernels.native.library import NativeKernels, load_kernels
from runtime.environment import kernel_cache_dir

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler on this machine"
)


def native_kernels(target: Target = "native") -> NativeKernels:
    return load_kernels(kernel_cache_dir(), target)


def packing_kernels() -> NativeKernels:
    """Those with packed bfloat16 linear layers; without such a CPU the test is skipped. There the worker says
    in its log that these layers stay with torch, and refuses --deterministic.
    """
    kernels = native_kernels()
    if not kernels.packs_linear:
        pytest.skip("this CPU has no AVX512-BF16, so linear layers stay with torch")
    return kernels
