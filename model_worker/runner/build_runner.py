"""Construction of a runner: its tables, its sampler, and the kind of runner that the settings ask for."""

from __future__ import annotations

from typing import Any

from model_worker.device.base import Device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.distributed.stage_link import StageLink
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.memory.prompt_tables import PromptTables
from model_worker.models.base import Model
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from model_worker.runner.embedding_runner import EmbeddingRunner
from model_worker.runner.model_runner import ModelRunner
from model_worker.runner.stage_runner import StageRunner
from model_worker.runner.step_sampler import StepSampler
from model_worker.runner.step_tables import StepTables
from model_worker.sampling.processors.runner import ProcessorRunner
from runtime.checkpoint.pooling import Pooling


def build_runner(
    model: Model,
    kv_pool: MHATokenToKVPool,
    ops: Ops,
    device: Device,
    *,
    max_rows: int,
    max_len: int,
    vocab_size: int,
    group: RankGroup = SOLO,
    row_adapters: RowAdapters | None = None,
    prompt_tables: PromptTables | None = None,
    processors: ProcessorRunner | None = None,
    pooling: Pooling | None = None,
    link: StageLink | None = None,
    **options: Any,
) -> ModelRunner:
    """Make a runner over a KV pool.

    - max_rows, max_len, row_adapters, prompt_tables: as in StepTables. vocab_size, group, processors: as in
      StepSampler.
    - pooling: for a model whose steps end in vectors. link: to the other pipeline stages.
    - options: as in ModelRunner.
    """
    tables = StepTables(
        kv_pool,
        device,
        max_rows=max_rows,
        max_len=max_len,
        row_adapters=row_adapters,
        prompt_tables=prompt_tables,
    )
    sampler = StepSampler(
        ops,
        device,
        tables,
        vocab_size=vocab_size,
        group=group,
        processors=processors,
        has_logits=link is None or link.layout.is_last,
    )
    options |= {"tables": tables, "sampler": sampler, "vocab_size": vocab_size}
    if pooling is not None:
        return EmbeddingRunner(model, ops, device, **options, pooling=pooling)
    if link is not None:
        return StageRunner(model, ops, device, **options, link=link)
    return ModelRunner(model, ops, device, **options)
