"""Which launch a client finds, and what LLM does with its settings."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from carousel import LLM, ConfigError, RingClosed
from carousel.client.connection.target import find_run_dir, find_target
from runtime.base.environment import default_run_root
from runtime.launcher.command_line import parse_args
from runtime.settings.keywords import flags_of_keywords
from runtime.settings.server_settings import HTTP_SETTINGS
from runtime.wire.status_page import StatusPage
from tests.harness.cases import for_each
from tests.harness.ring.other_user import give_away


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("CAROUSEL_RUN_DIR", raising=False)
    root = tmp_path / "carousel"
    root.mkdir(mode=0o700)
    return root


@contextmanager
def live_launch(path: Path) -> Iterator[Path]:
    path.mkdir()
    (path / "state.json").write_text("{}")
    fd = os.open(path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        os.close(fd)


def test_a_named_directory_comes_first_then_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAROUSEL_RUN_DIR", "/from/environment")
    assert find_run_dir("/named") == Path("/named")
    assert find_run_dir() == Path("/from/environment")


def test_the_only_live_launch_is_found_and_dead_ones_are_not(root: Path) -> None:
    (root / "dead").mkdir()
    (root / "dead" / "lock").touch()
    with live_launch(root / "live") as live:
        assert find_run_dir() == live


def test_no_live_launch_says_where_it_looked(root: Path) -> None:
    with pytest.raises(RingClosed, match=str(root)):
        find_run_dir()


def test_an_http_address_is_not_taken_for_a_directory() -> None:
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:30000 is neither"):
        find_target("http://127.0.0.1:30000")


def test_a_named_directory_that_another_user_may_have_made_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign, open_to_all = tmp_path / "foreign", tmp_path / "open"
    foreign.mkdir()
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    find_target(tmp_path / "not there yet")
    find_target(foreign)
    give_away(monkeypatch, foreign)
    with pytest.raises(ConfigError, match=r"run_dir: .*foreign belongs to another user"):
        find_target(foreign)
    with pytest.raises(ConfigError, match=r"run_dir: .*open can be changed by other users \(chmod go-w\)"):
        find_target(open_to_all)


def test_an_environment_of_another_user_is_no_place_for_launches(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_run_root() == root
    give_away(monkeypatch, root.parent)
    assert default_run_root() == Path(f"/tmp/carousel-{os.getuid()}")


def test_several_live_launches_are_listed(root: Path) -> None:
    with (
        live_launch(root / "one"),
        live_launch(root / "two"),
        pytest.raises(ConfigError, match=r"one.*two"),
    ):
        find_run_dir()


def test_a_node_that_has_ranks_alone_is_not_found(root: Path) -> None:
    """Node 0 of a launch over several machines is, though both are on this one."""
    config = {"config": {"node_rank": 1, "dist_addr": "127.0.0.2:29500", "page_size": 4}}
    with live_launch(root / "zero") as zero, live_launch(root / "one") as one:
        (one / "config.json").write_text(json.dumps(config))
        assert find_run_dir() == zero
        StatusPage(one / "status", create=True, counts={"worker": 1}).close()
        told = r"run_dir: .*one is that of node 1, which .* they go to node 0, at 127\.0\.0\.2$"
        with pytest.raises(ConfigError, match=told):
            find_target(one).open_watch()


def test_settings_of_llm_become_the_command_line_that_means_the_same() -> None:
    settings = {"model": "m", "page_size": 1, "disable_radix_cache": True, "mem_fraction_static": 0.5}
    config = parse_args(flags_of_keywords(settings))
    assert {name: getattr(config, name) for name in settings} == settings
    paths = {"model": Path("a/b"), "tokenizer": Path("c")}
    config = parse_args(flags_of_keywords(paths))
    assert (config.model, config.tokenizer) == ("a/b", "c")


def test_llm_understands_the_spellings_of_other_engines() -> None:
    config = parse_args(
        flags_of_keywords({"max_model_len": 100, "tensor_parallel_size": 2, "enforce_eager": True})
    )
    assert (config.context_length, config.tp_size, config.disable_cuda_graph) == (100, 2, True)
    with pytest.raises(ConfigError, match=r"max_model_len: context_length is given twice"):
        flags_of_keywords({"context_length": 100, "max_model_len": 100})


def test_llm_takes_flags_of_other_engines_as_the_command_line_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert flags_of_keywords({"trust_remote_code": True, "seed": 0, "load_format": "safetensors"}) == []
    assert [message.partition(": nothing changes")[0] for message in caplog.messages] == [
        "trust_remote_code=True",
        "seed=0",
        "load_format='safetensors'",
    ]
    assert flags_of_keywords({"enable_prefix_caching": False}) == ["--disable-radix-cache"]
    assert flags_of_keywords({"enable_prefix_caching": True, "enable_lora": False}) == []
    assert flags_of_keywords({"kv_cache_dtype": "fp8", "runner": "pooling"}) == [
        "--kv-cache-dtype=fp8_e4m3",
        "--task=embed",
    ]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    assert flags_of_keywords({"speculative_config": ngram, "compilation_config": {"level": 3}}) == [
        "--speculative-algorithm=NGRAM",
        "--speculative-num-draft-tokens=3",
    ]
    with pytest.raises(ConfigError, match=r"^speculative_config .*: draft models are not built"):
        flags_of_keywords({"speculative_config": {"method": "eagle", "model": "a/b"}})
    with pytest.raises(ConfigError, match=r"^enable_lora_bias: adapters with biases are refused"):
        flags_of_keywords({"enable_lora_bias": True})
    with pytest.raises(ConfigError, match=r"^quantization awq: this format is not built"):
        flags_of_keywords({"quantization": "awq"})


def test_llm_has_presets_and_what_the_caller_says_wins() -> None:
    assert parse_args(flags_of_keywords({"preset": "trtllm"})) == parse_args(["--preset", "trtllm"])
    # Also a value that is the default without a preset.
    chosen = {"chunked_prefill_size": 2048, "gpu_memory_utilization": 0.85, "disable_radix_cache": False}
    config = parse_args(flags_of_keywords({"preset": "trtllm", **chosen}))
    assert (config.chunked_prefill_size, config.mem_fraction_static) == (2048, 0.85)
    assert not config.disable_radix_cache
    assert config.disable_chunked_prefill
    static = parse_args(flags_of_keywords({"preset": "trtllm", "batching_type": "V1"}))
    assert static == parse_args(["--preset", "trtllm", "--batching-type", "V1"])
    assert static.capacity_policy == "static_batch"
    with pytest.raises(ConfigError, match=r"^batching_type: expected str, got \['V1'\]$"):
        flags_of_keywords({"preset": "trtllm", "batching_type": ["V1"]})
    for unknown in ("vllm", 7):
        with pytest.raises(ConfigError, match=r"preset: .* is unknown; known: trtllm"):
            flags_of_keywords({"preset": unknown})


@for_each("name", sorted({"no_such_setting", "port", "run_dir", "api_key", *HTTP_SETTINGS}))
def test_llm_refuses_what_is_not_its_setting_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a setting of LLM"):
        LLM(**dict[str, Any]({name: "x"}))
