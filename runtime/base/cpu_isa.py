"""Instruction sets that may be used on this CPU: all that it has, or fewer, so that a machine can run as a
lesser one would. Only this module decides that.

Compiled kernels ask `cpu_isa()`. `hold_back_libraries()` restricts libraries that choose kernels themselves,
such as torch and oneDNN.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from runtime.base.environment import set_wanted_cpu_isa, wanted_cpu_isa
from runtime.base.errors import ConfigError

CpuIsa = Literal["portable", "avx2", "avx512", "avx512_bf16", "amx"]
"""An instruction set; each contains the ones before it. portable: what all CPUs of an architecture have, and
the only one outside x86-64.
"""
CPU_ISAS: tuple[CpuIsa, ...] = get_args(CpuIsa)

# As /proc/cpuinfo spells them, beside those of the set before.
_FEATURES: dict[CpuIsa, set[str]] = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"},  # x86-64-v3
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},  # x86-64-v4
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
}
# The names that torch, oneDNN and MKL give the sets.
_LIBRARY_SETTINGS: dict[CpuIsa, dict[str, str]] = {
    "portable": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {},
}


def usable_isas() -> tuple[CpuIsa, ...]:
    """Return the instruction sets that may be used here, the smallest first. Raises ConfigError if
    CAROUSEL_CPU_ISA names one that does not exist or that this CPU lacks.
    """
    own = _machine_isas()
    wanted = wanted_cpu_isa() or own[-1]
    if wanted in own:
        return own[: own.index(wanted) + 1]
    known = wanted in CPU_ISAS
    trouble = f"this CPU has not all of {wanted}" if known else f"{wanted!r} is unknown"
    raise ConfigError(f"CAROUSEL_CPU_ISA: {trouble}; here it may be {', '.join(own)}, or unset for all")


def choose_cpu_isa(wanted: Literal["auto", CpuIsa]) -> None:
    """Restrict this process, its libraries and the processes that it starts to an instruction set. auto: use
    CAROUSEL_CPU_ISA, which is otherwise ignored. Raises ConfigError if this CPU lacks the set, and as
    hold_back_libraries.
    """
    own = _machine_isas()
    if wanted != "auto":
        if wanted not in own:
            raise ConfigError(
                f"cpu_isa: this CPU has not all of {wanted}; --cpu-isa may be {', '.join(own)}, or auto for "
                "all of them"
            )
        set_wanted_cpu_isa(wanted)
    hold_back_libraries()


def cpu_isa() -> CpuIsa:
    """Return the largest set that may be used. Raises: ConfigError as usable_isas."""
    return usable_isas()[-1]


def machine_isa() -> CpuIsa:
    """Return the largest set that this machine has."""
    return _machine_isas()[-1]


def hold_back_libraries() -> None:
    """Restrict the kernels of libraries to `cpu_isa()`, in this process and those that it starts. Call it
    before any library has computed. NumPy is not restricted. Raises ConfigError as usable_isas.
    """
    if (isa := cpu_isa()) != machine_isa():
        os.environ.update(_LIBRARY_SETTINGS[isa])


@cache
def _machine_isas() -> tuple[CpuIsa, ...]:
    """Return the instruction sets of this machine, the smallest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("portable",)
    features = _cpu_features()
    for number, isa in enumerate(CPU_ISAS):
        if not features >= _FEATURES[isa]:
            return CPU_ISAS[:number]
    return CPU_ISAS


def _cpu_features() -> set[str]:
    """Return the feature flags of the first core; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
