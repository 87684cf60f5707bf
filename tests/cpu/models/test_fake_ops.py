"""The whole worker over an Ops that has no kernel: what it computes, it computes by its Ops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_worker.device import make_device
from model_worker.load_worker import load_worker
from model_worker.worker import ModelWorker
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import unpack_ids
from tests.harness.models.fake_ops import FakeOps
from tests.harness.models.model_registry import FAMILIES, VOCAB_SIZE
from tests.harness.models.plans import FEEDBACK, PlanWriter, Wanted, tokens_of

PAGE_SIZE = 4
PAGES = {0: [9, 2, 5, 7], 1: [4, 1, 8, 3]}
PROMPTS = {0: [5, 40, 17, 3, 80], 1: [VOCAB_SIZE - 3]}


def _load(architecture: str, path: Path, ops: FakeOps, monkeypatch: pytest.MonkeyPatch) -> ModelWorker:
    config = next(iter(FAMILIES[architecture].cases.values())).config
    (path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [architecture]}))
    monkeypatch.setattr("model_worker.served_model.make_ops", lambda *_, **__: ops)
    settings = RuntimeConfig(
        model=str(path),
        dtype="float32",
        device="cpu",
        load_format="dummy",
        context_length=16,
        max_running_requests=2,
        page_size=PAGE_SIZE,
        max_total_tokens=40,
    )
    return load_worker(settings, make_device("cpu", threaded=False), lambda: None)


def test_every_family_runs_by_its_ops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    for architecture in FAMILIES:
        ops = FakeOps()
        worker = _load(architecture, tmp_path, ops, monkeypatch)
        asked |= {operation for operation, by, _ in ops.table.counts if by == ops.name}
        plans = PlanWriter(PAGE_SIZE)
        for row, prompt in PROMPTS.items():
            plans.open_row(row, prompt, PAGES[row], temperature=0.0)
        ops.attention.slots.clear()
        steps = [
            plans.plan(chunks=[(0, PROMPTS[0][:3], False)]),
            plans.plan(
                chunks=[(0, PROMPTS[0][3:], True), (1, PROMPTS[1], True)],
                wanted={0: Wanted(PROMPTS[0], 0, 1)},
            ),
            *(plans.plan([(0, FEEDBACK), (1, FEEDBACK)]) for _ in range(4)),
        ]
        results = [worker.launch(plan).result() for plan in steps]
        assert [tokens_of(result) for result in results] == [
            [],
            *([80 + n, (VOCAB_SIZE - 3 + n) % VOCAB_SIZE] for n in range(1, 6)),
        ]
        assert unpack_ids(results[1].prompts[0].top_ids)[0] == 4  # the successor of 3, before 80
        num_layers = len(ops.attention.slots) // len(steps)
        assert ops.attention.slots[: num_layers + 1 : num_layers] == [[36, 37, 38], [39, 8, 16]]
        worker.close()
    assert asked == {
        *("embedding", "take_rows", "rms_norm", "layer_norm", "rotary_angles"),
        *("linear", "head", "activation", "gated", "experts"),
    }
