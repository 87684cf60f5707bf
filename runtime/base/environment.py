"""Environment variables. They are read, and set, in this file only."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from itertools import takewhile
from pathlib import Path

API_KEY_VARIABLE = "CAROUSEL_API_KEY"


def api_key() -> str | None:
    """Return CAROUSEL_API_KEY, the key of the HTTP server if --api-key gives none; None when unset."""
    return os.environ.get(API_KEY_VARIABLE)


def has_vllm_api_key() -> bool:
    """Return True if VLLM_API_KEY is set, the variable with the key of vLLM's server. Its user expects a key
    here, too.
    """
    return bool(os.environ.get("VLLM_API_KEY"))


def wanted_cpu_isa() -> str:
    """Return CAROUSEL_CPU_ISA, the largest instruction set to use if --cpu-isa is not given (see
    runtime/base/cpu_isa.py); empty when unset.
    """
    return os.environ.get("CAROUSEL_CPU_ISA", "")


def set_wanted_cpu_isa(isa: str) -> None:
    """Set CAROUSEL_CPU_ISA, for this process and those that it starts."""
    os.environ["CAROUSEL_CPU_ISA"] = isa


def visible_gpus() -> list[str] | None:
    """Return CUDA_VISIBLE_DEVICES, the GPUs that CUDA programs may use; None (all) when unset. A negative
    number ends the list.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    return list(takewhile(lambda name: name and not name.startswith("-"), map(str.strip, named.split(","))))


def default_run_root() -> Path:
    """Return the directory that holds the run directories of this user's launches."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    # After `sudo -E` it may belong to another user, and must not get files of this one.
    if runtime_dir and Path(runtime_dir).is_dir() and Path(runtime_dir).stat().st_uid == os.getuid():
        return Path(runtime_dir) / "carousel"
    return Path("/tmp") / f"carousel-{os.getuid()}"


def starter_variables(names: Collection[str]) -> dict[str, str]:
    """Return those of `names` that are set: variables in which LeaderWorkerSet, torchrun, Slurm or Open MPI
    say where they started this process.
    """
    return {name: os.environ[name] for name in names if name in os.environ}


def kernel_cache_dir() -> Path:
    """Return the directory of compiled CPU kernels, for this user and all launches."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    # The specification of that variable says that a relative path is to be ignored.
    if cache_home and Path(cache_home).is_absolute():
        return Path(cache_home) / "carousel"
    try:
        return Path.home() / ".cache" / "carousel"
    except RuntimeError:  # HOME is unset, and the user of a container may have no entry in /etc/passwd
        return Path("/tmp") / f"carousel-cache-{os.getuid()}"


def environment_run_dir() -> str:
    """Return CAROUSEL_RUN_DIR: the launch that clients connect to when none is named; empty when unset."""
    return os.environ.get("CAROUSEL_RUN_DIR", "")


def c_compiler() -> str | None:
    """Return CC, the C compiler that Triton uses; None when unset, and then it uses gcc or clang."""
    return os.environ.get("CC")


def allow_fp_fusion() -> None:
    """Set TRITON_DEFAULT_FP_FUSION to 1 if it is unset, so that Triton fuses multiplication and addition.
    Kernels then keep their speed and rounding with Triton 3.10, which does not fuse by default, and 3.9 does
    not warn of the change.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def child_environment() -> dict[str, str]:
    """Return the environment for processes of a ring, to be used with `python -P`: that of this process,
    changed so that Python finds the project first, and the working directory, where users' own policies may
    be, last.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = filter(None, [root, os.environ.get("PYTHONPATH"), _here()])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # A worker's OpenMP threads spin before they sleep. The default spin takes the cores from the other
    # processes: with two spinners beside it a step took 83 ms this way, over a second without (2 cores, EPYC,
    # 2026-11).
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    # All ranks are on one machine. By default NCCL lets them meet over the first interface other than
    # loopback, which other machines may reach, and over which this machine need not reach itself.
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return environment


def find_users_modules() -> None:
    """Let this process import modules from the working directory, last, as the processes of a ring do."""
    here = _here()
    if here and here not in sys.path:
        sys.path.append(here)


def _here() -> str:
    """Return the working directory; empty if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
