"""LinearCosts: measured time of linear layers by the paths that a launch may take, to log where another path
is faster.

Measured in less than a second when a CPU first uses a path, and kept beside the compiled kernels. It is CPU
time of one thread, which other work on the machine hardly affects.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from model_worker.kernels.native.build import BuildError, cpu_description, trusted_cache
from model_worker.ops.base import LinearWeight, Ops
from model_worker.ops.torch_ops import TorchOps
from runtime.base.cpu_isa import cpu_isa

logger = logging.getLogger(__name__)

SHAPE = (2048, 1024)
NUM_WEIGHTS = 8  # one behind the other: more than the caches of most CPUs hold
MANY = 64
MIN_RATIO = 1.1  # below, it may be other work on the machine
MAX_RUNS, MAX_RUN_S = 5, 0.1


class LinearCost(msgspec.Struct, frozen=True):
    """Microseconds of a layer for one row, and for MANY rows."""

    one: float
    many: float

    def times(self, other: LinearCost) -> str:
        """Return this cost as a multiple of another."""
        one, many = _ratio(self.one, other.one), _ratio(self.many, other.many)
        return f"{one} times as long for one token and {many} times for {MANY}"

    def exceeds(self, other: LinearCost) -> bool:
        return self.one > MIN_RATIO * other.one or self.many > MIN_RATIO * other.many


class LinearCosts(msgspec.Struct, frozen=True):
    """Times that the layers of a launch take, and would take by other paths."""

    own: LinearCost
    in_float32: LinearCost
    by_torch: LinearCost
    read_us: float
    """Microseconds to read one layer's weights."""

    def slower_than_float32(self, dtype: torch.dtype) -> str:
        """Return a log line if the dtype is slower than float32; otherwise an empty text."""
        if not self.own.exceeds(self.in_float32):
            return ""
        return (
            f"linear layers in {_name(dtype)} take {self.own.times(self.in_float32)} as with --dtype "
            "float32, which takes twice the memory (measured on this CPU)"
        )

    def torch_instead(self) -> str:
        """Return a log line for users without any C++ kernels."""
        return (
            f"by torch, linear layers take {_ratio(self.own.one, self.read_us)} times as long for one token "
            "as reading their weights, which is about what the C++ kernels take (measured on this CPU)"
        )

    def torch_for_some(self) -> str:
        """Return what a layer without a C++ kernel costs compared with the others."""
        return f"by torch, linear layers take {self.by_torch.times(self.own)} (measured on this CPU)"


def linear_costs(ops: Ops, dtype: torch.dtype, cache_dir: Path, library: str) -> LinearCosts:
    """Return the costs of layers of dtype with these ops, from the cache if it has them. library: identity of
    the C++ kernels, if ops uses them. ops.table counts the layers that are measured.
    """
    known_by = (library, torch.__version__, cpu_isa(), _name(dtype))
    digest = hashlib.sha256("\0".join((*known_by, *cpu_description())).encode()).hexdigest()[:32]
    costs = None
    try:
        with trusted_cache(cache_dir) as cache:
            path = cache / f"linear-{digest}.json"
            if (costs := _read(path)) is None:
                costs = measure_linear_costs(ops, dtype)
                path.write_bytes(msgspec.json.encode(costs))
    except (BuildError, OSError) as error:
        logger.debug("costs of linear layers are not kept: %s", error)
    return costs or measure_linear_costs(ops, dtype)


def _read(path: Path) -> LinearCosts | None:
    """Return the costs in a file; None if there are none, or they cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LinearCosts)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def measure_linear_costs(ops: Ops, dtype: torch.dtype) -> LinearCosts:
    """Measure how long linear layers take; see LinearCosts."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(ops, dtype)
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def _measure(ops: Ops, dtype: torch.dtype) -> LinearCosts:
    own = _cost(ops, dtype)
    # Two 16-bit numbers are read as one, because torch sums 16-bit numbers slowly.
    weights = [_weight(dtype).view(torch.float32) for _ in range(NUM_WEIGHTS)]
    return LinearCosts(
        own=own,
        in_float32=own if dtype is torch.float32 else _cost(ops, torch.float32),
        by_torch=own if isinstance(ops, TorchOps) else _cost(TorchOps(), dtype),
        read_us=_least_us(lambda: [weight.sum() for weight in weights]) / NUM_WEIGHTS,
    )


def _cost(ops: Ops, dtype: torch.dtype) -> LinearCost:
    products = [ops.linear(LinearWeight(_weight(dtype), dtype)) for _ in range(NUM_WEIGHTS)]
    row, rows = (torch.full((count, SHAPE[1]), 0.5, dtype=dtype) for count in (1, MANY))
    one = _least_us(lambda: [product(row) for product in products]) / NUM_WEIGHTS
    return LinearCost(one, _least_us(lambda: products[0](rows)))


def _weight(dtype: torch.dtype) -> Tensor:
    return torch.full(SHAPE, 0.01, dtype=dtype)


def _least_us(function: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(MAX_RUNS):
        began = time.thread_time()
        function()
        best = min(best, time.thread_time() - began)
        if best > MAX_RUN_S:
            break
    return best * 1e6


def _ratio(this: float, other: float) -> str:
    return f"{this / other:.{1 if this < 10 * other else 0}f}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
