"""Model worker that sleeps: every step takes STEP_S, every token is the same one where its guide allows it,
and so are all log-probabilities. So a launch has a known capacity, and the cores are free for the load.

`python -m tests.harness.ring.sleeping_worker ARGUMENT ...` is `launch.py` with this worker instead of its
own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from runtime.base.mask_memory import MaskMemory
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.launcher import main as launcher
from runtime.launcher.hosts import local
from runtime.ring.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.sampling.features import LOGPROBS
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import (
    BatchPlan,
    ChunkLogprobs,
    MasksAwaited,
    PromptPositions,
    SampleMasks,
    StepResult,
    WorkerReady,
)
from runtime.wire.transport import Waiter

STEP_S = 0.05
TOKEN = 65
NUM_TOP, LOGPROB = 20, -1.0
ID_BYTES = 4
PAGE_SIZE = 16


def main(context: ProcessContext) -> None:
    serve(context, STEP_S, SameToken().step)


class SameToken:
    """Rows of a worker that all say TOKEN, those that ask for logprobs with as many as may be asked for. Rows
    whose guide forbids it say the first token that is allowed.
    """

    def __init__(self) -> None:
        self._memory: MaskMemory | None = None
        self._with_logprobs: set[int] = set()
        """Rows that ask for them."""

    def step(self, plan: BatchPlan, masks: SampleMasks | None) -> StepResult:
        for setup in plan.setups:
            if setup.features & LOGPROBS:
                self._with_logprobs.add(setup.row)
            else:
                self._with_logprobs.discard(setup.row)
        samples = [1] * plan.num_decodes + unpack_ids(plan.samples).tolist()
        rows = unpack_ids(plan.rows).tolist()
        chosen = sum(count for row, count in zip(rows, samples, strict=True) if row in self._with_logprobs)
        allowed = {} if masks is None else self._allowed(masks)
        return StepResult(
            plan.step,
            pack_ids(
                [allowed.get(row, TOKEN) for row, n in zip(rows, samples, strict=True) for _ in range(n)]
            ),
            plan.samples,
            _same_logprobs(chosen),
            NUM_TOP,
            _same_ids(TOKEN, chosen * NUM_TOP),
            _same_logprobs(chosen * NUM_TOP),
            prompts=tuple(
                map(_prompt_logprobs, (each for each in plan.prompt_positions if each.num_logprobs >= 0))
            ),
        )

    def _allowed(self, masks: SampleMasks) -> dict[int, int]:
        """Return the tokens of the rows that have a mask."""
        if masks.memory and (self._memory is None or self._memory.name != masks.memory):
            self._memory = MaskMemory.open(masks.memory)
        found: dict[int, int] = {}
        for row, mask in masks.masks:
            if not isinstance(mask, bytes):
                assert self._memory is not None
                mask = bytes(self._memory.slot(mask))
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            found.setdefault(row, TOKEN if bits[TOKEN] else int(bits.argmax()))
        return found


def _prompt_logprobs(positions: PromptPositions) -> ChunkLogprobs:
    count, num_top = len(positions.targets) // ID_BYTES, positions.num_logprobs
    top_ids, ranks = _same_ids(TOKEN, count * num_top), _same_ids(NUM_TOP, count)
    top = _same_logprobs(count * num_top)
    return ChunkLogprobs(positions.index, _same_logprobs(count), ranks, top_ids, top)


def _same_logprobs(count: int) -> bytes:
    return np.full(count, LOGPROB, np.float32).tobytes()


def _same_ids(value: int, count: int) -> bytes:
    """Return ids in the form of the wire. `pack_ids` took 4 ms for those of a step with 20 logprobs of 8,192
    tokens, which made the step late.
    """
    return np.full(count, value, np.int32).tobytes()


def serve(
    context: ProcessContext, step_s: float, step: Callable[[BatchPlan, SampleMasks | None], StepResult]
) -> None:
    """Answer plans as a worker on one rank does, each after so many seconds and with its masks, until the
    process is to stop.
    """
    config: Any = context.config
    inbox = context.inbox("rank_in", context.endpoints.rank_in(0))
    outbox = context.outbox(context.endpoints.step_results)
    rows, length = config.max_running_requests, config.context_length
    num_pages = rows * (length // PAGE_SIZE + 1)
    vocab_size = CheckpointConfig.read(Path(config.model)).vocab_size
    outbox.send(WorkerReady(num_pages, PAGE_SIZE, rows, length, vocab_size, "test"))
    context.ready(num_pages=num_pages)
    waiter = Waiter([inbox.socket, context.stop_wake.fd])
    masked: BatchPlan | None = None
    num_told = 0
    while not context.stop.is_set():
        context.beat()
        messages = inbox.drain(limit=1)
        for message in messages:
            if isinstance(message, SampleMasks) and masked is not None:
                outbox.send(step(masked, message))
                masked = None
            elif isinstance(message, BatchPlan):
                time.sleep(step_s)
                if message.defer_sampling:
                    masked = message
                else:
                    outbox.send(step(message, None))
            else:
                return
        if masked is not None and not messages and masked.step > num_told:
            num_told = masked.step
            outbox.send(MasksAwaited(num_told))
        if not messages:
            waiter.wait(HEARTBEAT_S / 2)


def launch_with(module: str, main: Callable[[ProcessContext], None]) -> None:
    """Be launch.py with `module` as its worker, or that worker, as the arguments of this process say."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("-"):
        local.MODULES["worker"] = module
        sys.exit(launcher.main(sys.argv[1:]))
    run_process("worker", main)


if __name__ == "__main__":
    launch_with("tests.harness.ring.sleeping_worker", main)
