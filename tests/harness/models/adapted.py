"""Models with adapters: the reference's weights with a merged adapter, and a model of ours."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from model_worker.adapters.slots import AdapterSlots
from model_worker.device import make_device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.loading.loader import load_model
from model_worker.models.transformer import CausalLM
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from runtime.checkpoint.model_config import ModelConfig
from runtime.wire.plan import AdapterLoaded, AdapterRef, LoadAdapter
from tests.harness.adapters import write_adapter

MAX_RANK = 64


class AdapterCase(NamedTuple):
    """An adapter's configuration, and which linear layers it changes."""

    rank: int = 8
    changes: Callable[[str], bool] = lambda name: True
    ranks: Callable[[str], int | None] = lambda name: None
    config: Mapping[str, Any] = {}


ADAPTERS: dict[str, AdapterCase] = {
    "rank_8": AdapterCase(8, config={"lora_alpha": 16}),
    "rank_16_rslora": AdapterCase(16, config={"lora_alpha": 4, "use_rslora": True}),
    "rank_64": AdapterCase(64, config={"lora_alpha": 64, "target_modules": "all-linear"}),
    "patterns": AdapterCase(
        8,
        ranks=lambda name: 3 if ".0." in name and name.endswith("_proj") else None,
        config={
            "lora_alpha": 8,
            "rank_pattern": {r"layers\.0\..*_proj": 3},
            "alpha_pattern": {r"layers\.1\.self_attn\.[a-z]+_proj": 24.0},
        },
    ),
    "attention_alone": AdapterCase(
        8,
        lambda name: name.endswith(("q_proj", "v_proj", "qkv_proj")),
        config={"target_modules": r".*\.self_attn\.(q|v|qkv)_proj"},
    ),
    "one_layer": AdapterCase(5, lambda name: ".layers.1." in f".{name}", config={"layers_to_transform": [1]}),
}


def linear_modules(hf: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Shapes of the reference's linear layers that may have adapters, by their names."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear)
        and name != "lm_head"
        and ".experts" not in name
        and not name.endswith(".gate")
    }


def save_adapter(hf: PreTrainedModel, case: AdapterCase, path: Path, seed: int = 0) -> None:
    """Write an adapter of random numbers for a model of transformers."""
    shapes = {name: shape for name, shape in linear_modules(hf).items() if case.changes(name)}
    ranks = {name: rank for name in shapes if (rank := case.ranks(name)) is not None}
    write_adapter(path, shapes, rank=case.rank, ranks=ranks, seed=seed, **case.config)


def save_peft_adapter(hf: PreTrainedModel, case: AdapterCase, path: Path, seed: int = 1) -> None:
    """Have the PEFT library make and write an adapter of random numbers for a model of transformers."""
    from peft import LoraConfig, get_peft_model

    changed = [name for name in linear_modules(hf) if case.changes(name)]
    said = dict(case.config)
    listed = sorted({name.rpartition(".")[2] for name in changed})
    has_experts = any(".experts" in name for name, _ in hf.named_modules())
    if has_experts and said.get("target_modules") == "all-linear":
        said["target_modules"] = listed  # the library would adapt experts and routers too
    said.setdefault("target_modules", listed)
    config = LoraConfig(r=case.rank, lora_dropout=0.05, task_type="CAUSAL_LM", **said)
    model = get_peft_model(copy.deepcopy(hf), config)
    names = {
        name.removeprefix("base_model.model.").rpartition(".lora_A")[0]
        for name, _ in model.named_parameters()
        if "lora_A" in name
    }
    assert names == set(changed), "the library adapts other modules"
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                scale = weight.shape[1] ** -0.5 if "lora_A" in name else 0.1
                weight.copy_(scale * torch.randn(weight.shape, generator=rng))
    model.save_pretrained(str(path))


def merged(hf: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Return a copy with the adapter in its weights, as the PEFT library merges it."""
    from peft import PeftModel

    model: PreTrainedModel = PeftModel.from_pretrained(copy.deepcopy(hf), path).merge_and_unload()
    return model.eval()


class Adapted(NamedTuple):
    """A model that takes adapters."""

    model: CausalLM
    rows: RowAdapters
    slots: AdapterSlots

    def load(self, adapters: Mapping[int, Path]) -> None:
        """Load these adapters into slots, and wait for them. Raises AssertionError with the reason."""
        for slot, path in adapters.items():
            self.slots.load(LoadAdapter(slot, AdapterRef(path.name, slot + 1, "", str(path))))
        answers = wait_for_answers(self.slots, len(adapters))
        assert all(isinstance(answer, AdapterLoaded) for answer in answers), answers

    def assign(self, slots: Sequence[int]) -> None:
        """Give rows 0, 1 … these slots."""
        for row, slot in enumerate(slots):
            self.rows.set_row(row, slot)


def wait_for_answers(slots: AdapterSlots, count: int) -> list[Any]:
    """Return so many answers; more than two minutes for one are too long."""
    from threading import Event

    came = Event()
    slots.on_news = came.set
    answers = slots.answers()
    while len(answers) < count:
        assert came.wait(120), f"{len(answers)} of {count} answers: {answers}"
        came.clear()
        answers += slots.answers()
    return answers


@contextlib.contextmanager
def adapted(
    path: Path,
    ops: Ops,
    *,
    dtype: torch.dtype = torch.float32,
    max_rows: int = 8,
    num_slots: int = 4,
    group: RankGroup = SOLO,
    **options: Any,
) -> Iterator[Adapted]:
    """Load a checkpoint that takes adapters. options: as load_model's."""
    rows = ops.row_adapters(max_rows, num_slots)
    config = ModelConfig.from_path(path)
    model = load_model(path, config, dtype, "cpu", ops=ops, adapters=(rows, MAX_RANK), group=group, **options)
    slots = AdapterSlots(model, make_device("cpu", threaded=False), max_rank=MAX_RANK, rank=group.rank)
    try:
        yield Adapted(model, rows, slots)
    finally:
        slots.close()
