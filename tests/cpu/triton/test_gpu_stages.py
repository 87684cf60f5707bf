"""The stages that measure a GPU, run on a CPU, by the interpreter: their logic, not their figures."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks.gpu.shapes import SHAPES, write_config
from benchmarks.gpu.stages import main
from runtime.model_config import ModelConfig


def test_every_stage_writes_its_file_and_is_not_run_twice(tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--device", "cpu", "--tiny"]) == 0
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    assert {entry["page_size"] for entry in kernels["decode"]} == {1, 16}
    assert kernels["prompt"]["of_matrix_rate"] > 0
    decode = json.loads((tmp_path / "decode-tiny.json").read_text())
    seen = {(each["batch"], each["graphs"], each["overlap"]) for each in decode["ms"]}
    assert seen == set(product((1, 3), (True, False), (True, False)))
    assert all(each["step"] > each["floor"] > 0 for each in decode["ms"])
    assert json.loads((tmp_path / "decode-tiny-3.trace.json").read_text())["traceEvents"]
    serve = json.loads((tmp_path / "serve-tiny.json").read_text())
    assert [run["overlap"] for run in serve["runs"]] == [False]
    assert serve["runs"][0]["output_tokens_per_s"] > 0
    assert json.loads((tmp_path / "baseline-tiny.json").read_text())["served_over_baseline"] > 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(before) == 7
    assert main(["--out", str(tmp_path), "--device", "cpu", "--tiny"]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_are_models_that_are_served(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    config = ModelConfig.from_path(tmp_path)
    assert config.num_layers == SHAPES[name]["num_hidden_layers"]
    assert (config.experts is not None) == ("num_experts" in SHAPES[name])
