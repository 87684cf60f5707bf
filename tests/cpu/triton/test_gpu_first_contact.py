"""The first steps of a contact with a GPU, on the pretended one."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import first_contact, stages
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.steps import WINDOWS
from tests.harness.pretended_gpu import pretended_gpu


def test_facts_and_rates_of_the_pretended_gpu_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folders = ("--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"))
    pretended = (sys.executable, "-m", "tests.harness.pretended_gpu.run")
    assert first_contact.main(["--tiny", "--minutes", "5", *folders], python=pretended) == 1
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert {entry["step"]: entry["status"] for entry in index} == {
        "facts": "ok",
        "device": "ok",
        "ncu-none": "missing: no-such-profiler",
    }
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        archive.extractall(tmp_path / "got", filter="data")
    facts = json.loads((tmp_path / "got" / "facts.json").read_text())
    assert facts["gpu"]["name"] == "a pretended GPU"
    assert facts["kernel"]["seconds"] > 0
    assert all("error" not in process for process in facts["imports"])
    device = json.loads((tmp_path / "got" / "device.json").read_text())
    assert device["copy_bytes_per_s"] > 0


def test_the_windows_run_stages_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of each step, with what is to be left out left out."""
    ran: dict[str, tuple[tuple[bool, ...], tuple[bool, ...]]] = {}

    def note(name: str, run: object, bench: Bench) -> bool:
        ran[name] = bench.sizes.graphs, bench.sizes.overlaps
        return True

    monkeypatch.setattr(stages, "run_stage", note)
    found = {}
    for window, (_, steps) in WINDOWS.items():
        ran.clear()
        for step in steps:
            if "benchmarks.gpu.stages" in step.command:
                arguments = [part.replace("{out}", str(tmp_path)) for part in step.command[3:]]
                with pretended_gpu():
                    assert stages.main(arguments) == 0
        found[window] = dict(ran)
    assert found["b"]["decode-llama-3.1-8b"] == found["c"]["decode-qwen3-0.6b"] == ((True,), (True, False))
    assert found["b"]["serve-qwen3-0.6b"] == ((True, False), (True, False))
    assert found["c"]["serve-qwen3-0.6b"] == ((True, False), (True,))
    assert {"device", "launch_cost", "graph_gap", "block_copy", "nccl"} <= found["a"].keys()
    assert {"kernels", "attention", "tiles"} <= found["b"].keys()
    assert "baseline-qwen3-0.6b" in found["c"]
