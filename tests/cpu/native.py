"""The C++ kernels for tests, from the user's own cache, where the first test to want them builds them."""

from __future__ import annotations

import shutil

import pytest

from model_worker.kernels.native.build import COMPILERS, Target
from model_worker.kernels.native.library import NativeKernels, load_kernels
from runtime.config import kernel_cache_dir

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler on this machine"
)


def native_kernels(target: Target = "native") -> NativeKernels:
    return load_kernels(kernel_cache_dir(), target)
