"""Prompt attention by each installed library, compared in time and result with the one that a server uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.gpu.kernels.attention_ways import CPU_WAYS, WAYS, Run
from benchmarks.gpu.kernels.kernel_rates import ExtendWork, Setting
from benchmarks.gpu.timing import recorded_ms, wait

PAGE_SIZE = 16
TOLERANCE = 3e-2  # of the largest: weights have bfloat16's 8 bits, and sums another order
MAX_ERROR = 300
"""Maximum number of characters of an error that are kept."""


class Prompts(NamedTuple):
    new: int  # tokens of each
    cached: int
    sequences: int = 1


PROMPTS = (
    Prompts(8192, 0),
    Prompts(2048, 6144),
    Prompts(64, 8128),
    Prompts(20, 8172),
    Prompts(512, 0, sequences=16),
)
"""Cases: a long prompt, its last chunk, the prompts of chat turns after a long prefix, and a batch of short
ones.
"""


def attention_rates(prompts: Prompts, setting: Setting, matrix_rate: float) -> Iterator[dict[str, Any]]:
    """Yield for each library its time, its operations per second (also relative to a matrix product), and its
    largest difference from the first one's result, relative to that result's largest value; or why there is
    none.
    """
    work = ExtendWork(prompts.new, prompts.cached, PAGE_SIZE, setting, prompts.sequences)
    ways = WAYS if setting.device.name == "cuda" else CPU_WAYS
    expected: Tensor | None = None
    for name, make in ways.items():
        result: dict[str, Any] = {"way": name}
        try:
            run = make(work)
        except ImportError as error:
            yield {**result, "missing": f"not installed: {error}"}
            continue
        except Exception as error:  # whatever a library says, the others are tried
            yield {**result, **_failure(error)}
            continue
        measured, out = _measured(run, expected, setting, work.operations, matrix_rate)
        expected = out if expected is None else expected
        yield {**result, **measured}


def _measured(
    run: Run, expected: Tensor | None, setting: Setting, operations: float, matrix_rate: float
) -> tuple[dict[str, Any], Tensor | None]:
    """Return the figures of one library, and its result, or None if it failed."""
    try:
        out = run().clone()
        wait(setting.at)
        difference = 0.0
        if expected is not None:
            assert out.shape == expected.shape, f"a result of {tuple(out.shape)}"
            difference = float((out - expected).abs().max() / expected.abs().max())
        if not difference <= TOLERANCE:
            return {"difference": difference, "error": "computes something else"}, None
        ms = recorded_ms(run, setting.device, setting.repeats)
    except Exception as error:  # as above
        wait(setting.at)  # raises where the device is lost
        return _failure(error), None
    rate = operations / (ms * 1e-3)
    figures = {"ms": ms, "operations_per_s": rate, "of_matrix_rate": rate / matrix_rate}
    return {"difference": difference, **figures}, out


def _failure(error: Exception) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}
