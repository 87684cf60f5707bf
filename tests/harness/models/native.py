"""C++ kernels for tests, from the user's own cache, where the first test that needs them builds them."""

from __future__ import annotations

import shutil

import pytest

from model_worker.kernels.native.build import COMPILERS
from model_worker.kernels.native.library import NativeKernels, load_kernels
from runtime.base.cpu_isa import CpuIsa, cpu_isa, usable_isas
from runtime.base.environment import kernel_cache_dir

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler on this machine"
)


LEAST_ISA: CpuIsa = "avx2" if "avx2" in usable_isas() else "portable"
"""The set that nearly every CPU has."""
NATIVE_ISAS: tuple[CpuIsa, ...] = tuple(dict.fromkeys((cpu_isa(), LEAST_ISA)))
"""Sets for which the kernels are tested: the largest that may be used here, and LEAST_ISA."""
ISA_WITHOUT_AMX: CpuIsa = "avx512_bf16" if cpu_isa() == "amx" else cpu_isa()


def native_kernels(isa: CpuIsa | None = None) -> NativeKernels:
    """The kernels for as much as may be used here, or for no more than `isa`."""
    return load_kernels(kernel_cache_dir(), isa)
