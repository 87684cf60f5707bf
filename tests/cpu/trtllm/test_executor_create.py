"""Making a GenerationExecutor: its arguments, what it starts, and that nothing of it stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carousel import (
    ConfigError,
    ExecutorConfig,
    GenerationExecutor,
    GenerationRequest,
    KvCacheConfig,
    PeftCacheConfig,
    RayExecutor,
    RingClosed,
)
from carousel.trtllm import runtime_link
from tests.harness.ring.executor_back_ends import echo
from tests.harness.ring.fake_ring import WAIT_S, FakeRing, say_nothing
from tests.harness.ring.stand_in_runtime import StandInRuntime

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"run_dir": "x", "model": "y"}, "model"),
        ({"run_dir": "x", "page_size": 16}, "page_size"),
        ({"run_dir": "x", "num_postprocess_workers": 4}, "num_postprocess_workers"),
        ({"run_dir": "tcp://127.0.0.1:1"}, "run_dir"),
        ({"model": "tests", "engine_dir": "docs"}, "engine_dir: contradicts model"),
        ({"tokenizer_dir": "tests", "tokenizer": "docs"}, "tokenizer: contradicts tokenizer_dir"),
        ({"tokenizer_dir": "tests", "postprocess_tokenizer_dir": "docs"}, "postprocess_tokenizer_dir"),
        ({"gather_all_token_logits": True, "gather_generation_logits": False}, "gather_generation_logits"),
        ({"gather_all_token_logits": 1}, "gather_all_token_logits"),
        ({"num_postprocess_workers": -1}, "num_postprocess_workers"),
        ({"num_postprocess_workers": 65}, "num_postprocess_workers"),
        ({"num_postprocess_workers": True}, "num_postprocess_workers"),
        ({"engine_dir": "nowhere"}, "engine_dir: there is no directory nowhere"),
        ({"tokenizer_dir": "nowhere"}, "tokenizer_dir: there is no directory nowhere"),
        ({"postprocess_tokenizer_dir": "nowhere"}, "postprocess_tokenizer_dir: there is no directory"),
        ({"engine_dir": 7}, "engine_dir"),
        ({"engine_dir": Path("owner/name")}, "engine_dir: there is no directory"),
        ({"enable_chunked_context": 0}, "enable_chunked_context: true or false"),
        (
            {"enable_chunked_context": False, "disable_chunked_prefill": False},
            "disable_chunked_prefill: contradicts enable_chunked_context",
        ),
        ({"preset": "vllm"}, "preset"),
        ({"run_dir": "x", "preset": "trtllm"}, "preset"),
        ({"run_dir": "x", "kv_cache_config": KvCacheConfig()}, "kv_cache_config"),
        ({"executor_config": {}}, "executor_config: a carousel.ExecutorConfig, got dict"),
        ({"page_sise": 16}, "page_sise"),
        ({"max_num_seqs": 0}, r"^max_num_seqs: expected int >= 1"),
        (
            {"executor_config": ExecutorConfig(max_batch_size=1 << 30)},
            r"^executor_config\.max_batch_size: expected int <= ",
        ),
        ({"peft_cache_config": PeftCacheConfig(num_put_workers=999)}, r"^peft_cache_config\.num_put_workers"),
    ],
)
def test_create_refuses_a_wrong_argument_by_name_and_starts_nothing(
    arguments: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=named):
        GenerationExecutor.create(**arguments)


@pytest.mark.parametrize(
    ("arguments", "model", "settings"),
    [
        ({}, "", {}),
        ({"engine_dir": "tests", "page_size": 16}, Path("tests"), {"page_size": 16}),
        ({"model": "tests", "engine_dir": "tests"}, Path("tests"), {}),
        ({"tokenizer_dir": "docs"}, "", {"tokenizer": Path("docs")}),
        (
            {"num_postprocess_workers": 4, "postprocess_tokenizer_dir": "docs"},
            "",
            {"detokenizer_workers": 4, "tokenizer": Path("docs")},
        ),
        ({"num_postprocess_workers": 0}, "", {"detokenizer_workers": 1}),
        (
            {"gather_all_token_logits": True},
            "",
            {"gather_context_logits": True, "gather_generation_logits": True},
        ),
        ({"gather_context_logits": True}, "", {"gather_context_logits": True}),
        ({"engine_dir": "owner/name"}, "owner/name", {}),
        ({"tokenizer_dir": "owner/name"}, "", {"tokenizer": "owner/name"}),
        ({"preset": "trtllm"}, "", {"preset": "trtllm"}),
        ({"enable_chunked_context": True}, "", {"disable_chunked_prefill": False}),
        (
            {"enable_chunked_context": False},
            "",
            {"disable_chunked_prefill": True, "chunked_prefill_size": 8192},
        ),
        (
            {"enable_chunked_context": False, "max_num_tokens": 64},
            "",
            {"disable_chunked_prefill": True, "chunked_prefill_size": 64},
        ),
    ],
)
def test_create_passes_its_arguments_on_as_settings(
    arguments: dict[str, Any],
    model: Path | str,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    started: list[tuple[Any, Any]] = []
    ring = FakeRing(tmp_path, say_nothing)

    def start(model: Any, settings: Any, named_by: Any) -> StandInRuntime:
        started.append((model, settings))
        return StandInRuntime(ring)

    monkeypatch.setattr(runtime_link, "OwnRuntime", start)
    GenerationExecutor.create(**arguments).shutdown()
    assert started == [(model, settings)]
    ring.close()


def test_shutdown_stops_only_a_runtime_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FakeRing(tmp_path, say_nothing)
    runtime = StandInRuntime(ring)
    monkeypatch.setattr(runtime_link, "OwnRuntime", lambda *_: runtime)
    with GenerationExecutor.create():
        with GenerationExecutor.create(run_dir=tmp_path):
            pass
        assert runtime.num_stops == 0
    assert runtime.num_stops == 1
    ring.close()


def test_a_runtime_that_cannot_be_reached_is_stopped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = FakeRing(tmp_path, say_nothing)
    ring.shakes_hands = False
    runtime = StandInRuntime(ring)
    monkeypatch.setattr(runtime_link, "OwnRuntime", lambda *_: runtime)
    with pytest.raises(RingClosed, match="has not answered"):
        GenerationExecutor.create(connect_timeout=0.01)
    assert runtime.num_stops == 1
    ring.close()


def test_dropping_an_executor_stops_its_runtime_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = FakeRing(tmp_path, echo)
    runtime = StandInRuntime(ring)
    monkeypatch.setattr(runtime_link, "OwnRuntime", lambda *_: runtime)
    executor = GenerationExecutor.create()
    executor.await_responses(executor.enqueue_request(GenerationRequest([65])), timeout=WAIT_S)
    del executor
    assert runtime.num_stops == 1
    ring.close()


def test_an_executor_over_rays_machines_is_one_with_a_runtime_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else about it: the tests of executors, which have it as a third back end in their full form."""
    ring = FakeRing(tmp_path, echo)
    runtime = StandInRuntime(ring)
    asked: list[Any] = []

    def start(model: Any, settings: Any, named_by: Any) -> StandInRuntime:
        asked.append((model, settings))
        return runtime

    monkeypatch.setattr(runtime_link, "OwnRuntime", start)
    with RayExecutor.create(nnodes=2, dist_addr="10.0.0.1:29500") as executor:
        assert executor.generate([65, 66]).result(WAIT_S).text == "AB"
    assert asked == [("", {"executor": "ray", "nnodes": 2, "dist_addr": "10.0.0.1:29500"})]
    assert runtime.num_stops == 1
    ring.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"run_dir": "x"}, "run_dir: .* attach with GenerationExecutor"),
        ({"executor": "nodes", "nnodes": 2}, "executor: RayExecutor has ray, got 'nodes'"),
    ],
)
def test_an_executor_over_rays_machines_has_no_others(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RayExecutor.create(**arguments)
