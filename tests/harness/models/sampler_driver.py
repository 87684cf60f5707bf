"""Driver of a Sampler: rows, positions and random logits, without a model and without plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from model_worker.device.cpu import CpuDevice
from model_worker.sampling.capabilities.base import SamplingCapability
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.sampler import Sampler
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.base.cpu_isa import CpuIsa
from runtime.wire.format import RowMasks
from tests.harness.models.native import LEAST_ISA, native_kernels
from tests.harness.row_setups import Row

Capability = TypeVar("Capability", bound=SamplingCapability)

VOCAB = 1003  # not a multiple of the four lanes of a Philox word
MAX_ROWS = 64
MAX_LEN = 128
CPU = CpuDevice(threaded=False)


class OnePassDevice(CpuDevice):
    """A CPU that samples the way a GPU does: no look at intermediate results."""

    prefers_one_pass = True


class NativeDevice(CpuDevice):
    """A CPU whose sampler has the C++ kernels."""

    isa: CpuIsa | None = None


class LeastDevice(NativeDevice):
    """One without the instructions that only some CPUs have."""

    isa = LEAST_ISA


class InterpretedDevice(CpuDevice):
    """A CPU that a sampler takes for a GPU: it launches Triton's kernels, which the interpreter runs."""

    name = "cuda"


INTERPRETED = InterpretedDevice(threaded=False)


def setup(row: int = 0, **fields: Any) -> Row:
    return Row(**{"row": row, "num_prompt": 4, **fields})


def who(rows: Sequence[int], positions: Sequence[int]) -> SampleRows:
    r, p = np.array(rows, np.int64), np.array(positions, np.int64)
    return SampleRows(torch.from_numpy(r), torch.from_numpy(p), r, p)


def one_each(masks: Mapping[int, bytes] | None) -> RowMasks:
    """A mask for the next token of each of these rows."""
    return {row: [mask] for row, mask in (masks or {}).items()}


def step_of(sampler: Sampler, whose: SampleRows, masks: Mapping[int, bytes] | None = None) -> SamplingStep:
    return SamplingStep(CPU, whose, sampler._columns.features[whose.rows_host], one_each(masks))


def sample(
    sampler: Sampler,
    logits: Tensor,
    rows: Sequence[int],
    positions: Sequence[int],
    masks: Mapping[int, bytes] | None = None,
) -> StepSample:
    with torch.inference_mode():
        return sampler.sample(logits.clone(), who(rows, positions), one_each(masks))


def sampler_with(device: CpuDevice, *setups: Row, vocab: int = VOCAB) -> Sampler:
    kernels = native_kernels(device.isa) if isinstance(device, NativeDevice) else None
    sampler = Sampler(device, max_rows=MAX_ROWS, max_len=MAX_LEN, vocab_size=vocab, kernels=kernels)
    reopen(sampler, *setups)
    return sampler


def reopen(sampler: Sampler, *setups: Row) -> None:
    with torch.inference_mode():
        sampler.open_rows([s.setup() for s in setups])


def capability_of(sampler: Sampler, kind: type[Capability]) -> Capability:
    """The sampler's object of that kind."""
    return next(each for each in sampler._capabilities if isinstance(each, kind))


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def bitmask(allowed: Sequence[int], vocab: int = VOCAB) -> bytes:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.tobytes()
