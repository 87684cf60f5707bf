"""Recording: interface between the runner and recorded steps. The Ops decides which kind is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device.base import Device
from model_worker.distributed.layout import Layout
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.models.base import Model
from model_worker.models.decoder import StageOutput
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from model_worker.runner.future_map import FutureMap
from model_worker.runner.step_output import ForwardOutput
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.sampler import Sampler
from runtime.wire.plan import BatchPlan


class Recording(Protocol):
    """Recorded steps, which run without Python between their kernels. Methods must run on the
    forward stream.
    """

    def fits(self, plan: BatchPlan) -> bool:
        """Return True if the recording can compute this plan."""
        ...

    def run(self, plan: BatchPlan) -> ForwardOutput:
        """Compute a plan that fits, including its page table changes, but without its setups and page copies.
        The result is valid until the next step.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepParts:
    """Parts that a step is made of."""

    model: Model
    ops: Ops
    device: Device
    kv_pool: MHATokenToKVPool
    table: ReqToTokenPool
    future: FutureMap
    sampler: Sampler | None  # None: another rank samples
    num_ranks: int
    sizes: Sequence[int]  # of batches of decodes, ascending, where each is recorded by itself
    max_guesses: int  # of a row in a step that is recorded; 0: none
    max_len: int
    vocab_size: int
    example: BatchPlan  # a small one, which may be run any number of times
    lay_out: Callable[[BatchPlan], ForwardBatch]
    row_adapters: RowAdapters | None = None  # those of a model that takes adapters


class StageRecording(Protocol):
    """Recorded layers of a pipeline stage; see Recording."""

    def fits(self, plan: BatchPlan) -> bool:
        """Return True if the recording can compute this plan."""
        ...

    def put(self, came: tuple[Tensor, Tensor] | None) -> None:
        """Set the hidden states of the stage before, from which the next run continues."""
        ...

    def run(self, plan: BatchPlan) -> ForwardOutput | tuple[StageOutput, SampleRows]:
        """Compute a plan as Recording.run does. A stage that is not the last returns its output for the next
        stage, and the rows whose tokens will be sampled.
        """
        ...


StageRecorder = Callable[[StepParts, Layout], StageRecording | None]
Recorder = Callable[[StepParts, Callable[[], None]], Recording | None]
"""Function that records a forward if it can, and returns the recording or None. It calls its second argument
now and then. Raises ConfigError.
"""
