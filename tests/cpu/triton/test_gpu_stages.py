"""The stages that measure a GPU, run on a CPU, by the interpreter: their logic, not their figures."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import bars, library_batching, stages
from benchmarks.gpu.kernels.attention_variants import GPUS
from benchmarks.gpu.kernels.attention_ways import CPU_WAYS, WAYS
from benchmarks.gpu.kernels.launch_calls import LAYERS
from benchmarks.gpu.kernels.tile_sweep import Candidate, ranked
from benchmarks.gpu.kernels.variants import decode_runner, variants_of
from benchmarks.gpu.shapes import SHAPES, linear_shapes, write_config
from benchmarks.gpu.stages import main
from model_worker.device import make_device
from runtime.checkpoint.model_config import ModelConfig
from tests.harness.pretended_gpu import MULTIPROCESSORS, pretended_gpu

INTERPRETED = "tests.harness.pretended_gpu.interpreted"
TINY = ("--device", "cpu", "--tiny")
OF_ONE_PROCESS = (*stages.STAGES, "decode")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the stages that need a GPU and four libraries, made where no other can be imported."""
    out = tmp_path_factory.mktemp("stages")
    libraries = "torch,triton,numpy,msgspec"
    run_stages = ("benchmarks.gpu.stages", "--out", str(out), *TINY, *OF_ONE_PROCESS)
    run = subprocess.run(
        [sys.executable, "-m", "tests.harness.ring.closed_imports", libraries, INTERPRETED, *run_stages],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return out


def test_kernels_tiles_and_steps_are_measured_with_four_libraries(measured: Path) -> None:
    kernels = json.loads((measured / "kernels.json").read_text())
    assert {entry["page_size"] for entry in kernels["decode"]} == {1, 16}
    assert kernels["prompt"]["of_matrix_rate"] > 0
    assert [entry["page_size"] for entry in kernels["decode_float8"]] == [16]
    assert [draw["launches"] for draw in kernels["draw"]] == [2, 2, 4, 4, 4, 4]
    assert {linear["layer"] for linear in kernels["linear"]} == linear_shapes("tiny").keys()
    assert all(linear["of_copy_rate"] > 0 for linear in kernels["linear"])
    tiles = json.loads((measured / "tiles.json").read_text())
    for each in (*tiles["decode"], *tiles["extend"]):
        assert each["default_over_best"] >= 1.0
        assert [tried["ms"] for tried in each["tried"]] == sorted(tried["ms"] for tried in each["tried"])
        assert sum(tried["is_default"] for tried in each["tried"]) == 1 < len(each["tried"])
    decode = json.loads((measured / "decode-tiny.json").read_text())
    seen = {(each["batch"], each["graphs"], each["overlap"]) for each in decode["ms"]}
    assert seen == set(product((1, 3), (True, False), (True, False)))
    assert all(each["step"] > each["floor"] > 0 for each in decode["ms"])
    with gzip.open(measured / decode["trace"]["file"]) as trace:
        assert json.load(trace)["traceEvents"]


def test_attention_launches_graphs_copies_and_a_group_are_measured(measured: Path) -> None:
    def read(stage: str) -> dict[str, Any]:
        return json.loads((measured / f"{stage}.json").read_text())

    prompts = read("attention")["prompts"]
    assert {(each["new"], each["cached"], each["sequences"]) for each in prompts} == {(5, 0, 1), (2, 17, 2)}
    assert [each["way"] for each in prompts] == [*CPU_WAYS, *CPU_WAYS]
    assert max(each["difference"] for each in prompts) < 1e-5
    assert all(each["of_matrix_rate"] > 0 for each in prompts)
    launches = {each["call"]: each["launches"] for each in read("launch_cost")["calls"]}
    assert launches["decode attention, two splits"] == ["_attend_split", "_merge_splits"]
    assert launches["experts"] == ["_sort", "_grouped_product", "_gate", "_grouped_product", "sum"]
    assert launches["truncation and draw"] == ["_extremes", "_count", "_best_in_block", "_best_of_row"]
    assert all(launches.values())
    layers = read("launch_cost")["layers"]
    assert layers.keys() == LAYERS.keys()
    assert all(us > 0 for us in layers.values())
    assert read("graph_gap")["kernels"]["us_of_one_node"] > 0
    assert [each["batch"] for each in read("block_copy")["copies"]] == [1, 3]
    assert read("nccl")["all_reduce"][0]["us_all_reduce"] > 0


def test_the_runtime_is_measured_and_no_stage_twice(measured: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in measured.iterdir()}
    assert len(before) == len(OF_ONE_PROCESS) + 1
    assert main(["--out", str(measured), *TINY]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    serve = json.loads((measured / "serve-tiny.json").read_text())
    assert [run["overlap"] for run in serve["runs"]] == [False]
    assert serve["runs"][0]["output_tokens_per_s"] > 0
    baseline = json.loads((measured / "baseline-tiny.json").read_text())
    assert baseline["ours"] == serve["runs"]  # the load is the same, and is not served again
    (ratio,) = baseline["ratios"]
    assert (ratio["ours"], ratio["library"]) == ("torch_native", "sdpa")
    assert ratio["equal_attention"]
    assert ratio["ratio"] > 0


@pytest.fixture(scope="module")
def short_of_memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """`decode` where one batch is too large: its files, and what Triton would have compiled."""
    out, sizes = tmp_path_factory.mktemp("decode"), replace(stages.TINY, batches=(50_000, 1), graphs=(False,))
    with pytest.MonkeyPatch.context() as patch, pretended_gpu(20_000_000) as gpu:
        patch.setattr(stages, "TINY", replace(sizes, num_steps=2))
        assert main(["--out", str(out), "--device", "cuda", "--tiny", "decode"]) == 1
    return out, list(gpu.compiled)


def test_a_batch_for_which_memory_ends_is_an_error_beside_the_others(
    short_of_memory: tuple[Path, list[str]],
) -> None:
    measured = json.loads((short_of_memory[0] / "decode-tiny.json").read_text())["ms"]
    assert [each["batch"] for each in measured] == [50_000, 1, 1]
    assert "OutOfMemoryError" in measured[0]["error"]
    assert all(each["step"] > 0 for each in measured[1:])


def test_what_a_runner_launches_is_known_before_there_is_one(short_of_memory: tuple[Path, list[str]]) -> None:
    """With the same types, constants and alignments, over tensors without memory."""
    runner = replace(decode_runner("tiny", torch.float32, 1, stages.TINY.context + 1), graph_sizes=())
    launched = short_of_memory[1]
    assert len(launched) > 20
    assert set(launched) <= set(variants_of(runner, GPUS[90], MULTIPROCESSORS))


@pytest.mark.full
def test_the_stages_of_one_process_run_on_the_pretended_gpu(tmp_path: Path) -> None:
    """With what only a GPU has: recordings, a second stream, the caches that its rates are to go past."""
    with pretended_gpu():
        assert main(["--out", str(tmp_path), "--device", "cuda", "--tiny", *OF_ONE_PROCESS]) == 0
    kernels = json.loads((tmp_path / "kernels.json").read_text())
    refused, taken = (each["ms"] for each in kernels["linear_float8"])
    assert [name for name, ms in refused.items() if ms is None] == ["product", "product, fast sums"]
    assert all(taken.values())
    tiles = json.loads((tmp_path / "tiles.json").read_text())
    assert all("ms" in tried for each in (*tiles["decode"], *tiles["extend"]) for tried in each["tried"])
    decode = json.loads((tmp_path / "decode-tiny.json").read_text())
    assert all(each["step"] > each["floor"] > 0 for each in decode["ms"])
    assert all(each["step"] > each["busy"] > each["gap"] > 0 for each in decode["ms"])
    prompts = json.loads((tmp_path / "attention.json").read_text())["prompts"]
    assert [each["way"] for each in prompts] == [*WAYS, *WAYS]
    not_there = {each["way"]: each.keys() & {"error", "missing"} for each in prompts if "ms" not in each}
    assert not_there == {way: {"error" if "torch" in way else "missing"} for way in WAYS if way != "triton"}


def test_the_librarys_batching_runs_on_the_pretended_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Its pool is sized as on a GPU, by its memory."""
    load = ("--requests", "3", "--input-len", "20", "--output-len", "6")
    with pretended_gpu(600_000_000) as gpu, gpu.seen_by_new_threads():
        assert library_batching.main(["--model", "tiny", "--dtype", "float32", *load]) == 0
        assert "_safe_softmax" in gpu.launches
    baseline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert baseline["output_tokens_per_s"] > 0
    assert baseline["attention"] == "sdpa"


def test_a_library_that_is_late_is_killed_and_one_that_fails_says_why() -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    assert library_batching.last_line(python("print('log'); print('{}')"), 30.0) == "{}"
    with pytest.raises(TimeoutError, match=r"killed after 0.3 s"):
        library_batching.last_line(python("import time; time.sleep(60)"), 0.3)
    with pytest.raises(RuntimeError, match="out of memory"):
        library_batching.last_line(python("raise SystemExit('out of memory')"), 30.0)


def test_a_tile_that_does_not_fit_or_computes_something_else_is_written_down_as_that() -> None:
    out = torch.zeros(4)

    def does_not_fit() -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    runs = {"default": lambda: out.fill_(1.0), "large": does_not_fit, "wrong": lambda: out[:2].fill_(1.0)}
    candidates = [Candidate({"block_n": n}, run) for n, run in enumerate(runs.values())]
    timed, large, wrong = ranked(candidates, out, make_device("cpu", threaded=False), repeats=1)
    assert timed["is_default"]
    assert "300000" in large["error"]
    assert wrong["error"] == "computes something else"


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_are_models_that_are_served(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    config = ModelConfig.from_path(tmp_path)
    assert config.num_layers == SHAPES[name]["num_hidden_layers"]
    assert (config.experts is not None) == ("num_experts" in SHAPES[name])


def test_bars_are_met_missed_or_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, result: object) -> None:
        (tmp_path / name).write_text(json.dumps(result))

    def verdicts() -> dict[str, str]:
        return {bar["name"]: bar["verdict"] for bar in json.loads((tmp_path / "bars.json").read_text())}

    assert bars.main([str(tmp_path)]) == 0
    assert set(verdicts().values()) == {"not measured"}
    fast = {"batch": 64, "graphs": True, "overlap": True, "step": 2.2, "gap": 0.02, "of_floor": 1.1}
    slow = {**fast, "overlap": False, "step": 2.4, "gap": 0.2}
    write("decode-qwen3-0.6b.json", {"ms": [{**fast, "graphs": False, "gap": 9.0}, slow, fast]})
    write("kernels.json", {"decode": [{"batch": 64, "context": 4096, "page_size": 16, "of_copy_rate": 0.7}]})
    xml = '<testsuites><testsuite tests="5" skipped="1" failures="{}" errors="0"/></testsuites>'
    (tmp_path / "gpu-test.xml").write_text(xml.format(0))
    ratios = [{"equal_attention": False, "ratio": 3.0}, {"equal_attention": True, "ratio": 4.5}]
    write("baseline-qwen3-0.6b.json", {"ratios": ratios, "seconds": 481.0})
    assert bars.main([str(tmp_path)]) == 1
    found = verdicts()
    met = {name for name, verdict in found.items() if verdict == "met"}
    assert met == {
        "tests that failed",
        "qwen3-0.6b, batch 64: idle gap, ms",
        "qwen3-0.6b, batch 64: share of the gap that overlap removes",
        "qwen3-0.6b, batch 64: step with overlap over without",
        "qwen3-0.6b: HTTP over the library's batching, torch's attention in both",
    }
    missed = [name for name, verdict in found.items() if verdict == "missed"]
    assert missed == ["decode attention, pages of 16: of the copy rate", "seconds of baseline-qwen3-0.6b"]
    assert "missed" in capsys.readouterr().out
    write("kernels.json", {})
    write("baseline-qwen3-0.6b.json", {})
    assert bars.main([str(tmp_path)]) == 0
    (tmp_path / "gpu-test.xml").write_text(xml.format(1))
    assert bars.main([str(tmp_path)]) == 1
