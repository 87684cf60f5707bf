"""Settings: declared once, checked by name, in the spellings users type."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.config import RuntimeConfig, make_parser, parse_args, resolve
from runtime.errors import ConfigError


def resolved(config: RuntimeConfig, tmp_path: Path) -> RuntimeConfig:
    return resolve(config, context_length=2048, dtype="bfloat16", model_path=tmp_path)


def test_no_arguments_give_the_declared_defaults() -> None:
    assert parse_args([]) == RuntimeConfig()


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--model", "m"], "model", "m"),
        (["--model-path", "m"], "model", "m"),
        (["--max-num-seqs", "8"], "max_running_requests", 8),
        (["--max-running-requests", "8"], "max_running_requests", 8),
        (["--block-size", "1"], "page_size", 1),
        (["--max-model-len", "99"], "context_length", 99),
        (["--max-num-batched-tokens", "64"], "chunked_prefill_size", 64),
        (["--gpu-memory-utilization", "0.5"], "mem_fraction_static", 0.5),
        (["--no-enable-prefix-caching"], "disable_radix_cache", True),
        (["--disable-radix-cache"], "disable_radix_cache", True),
        (["--disable-overlap-schedule"], "disable_overlap_schedule", True),
        (["--tensor-parallel-size", "1"], "tp_size", 1),
        (["--load-format", "dummy"], "load_format", "dummy"),
    ],
)
def test_spellings_of_other_servers_are_understood(argv: list[str], field: str, value: object) -> None:
    assert getattr(parse_args(argv), field) == value


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--page-size", "0"], "page_size"),
        (["--page-size", "many"], "page-size"),
        (["--port", "70000"], "port"),
        (["--mem-fraction-static", "1.0"], "mem_fraction_static"),
        (["--dtype", "int3"], "dtype"),
        (["--no-such-flag"], "--no-such-flag"),
        (["stray"], "stray"),
    ],
)
def test_bad_setting_is_an_error_that_names_it(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_args(argv)


def test_every_setting_has_a_help_text() -> None:
    text = make_parser("x").format_help()
    for field in msgspec.structs.fields(RuntimeConfig):
        assert "--" + field.name.replace("_", "-") in text


def test_resolve_fills_in_what_the_model_decides(tmp_path: Path) -> None:
    config = resolved(RuntimeConfig(model=str(tmp_path)), tmp_path)
    assert config.context_length == 2048
    assert config.dtype == "bfloat16"
    assert config.served_model_name == tmp_path.name
    assert config.device in ("cpu", "cuda")
    assert config.cpu_threads >= 1
    assert resolved(RuntimeConfig(dtype="half"), tmp_path).dtype == "float16"


@pytest.mark.parametrize(
    "config",
    [
        RuntimeConfig(tp_size=2),
        RuntimeConfig(context_length=4096),
        RuntimeConfig(chat_template="/nonexistent"),
    ],
    ids=["tp_size", "context_length", "chat_template"],
)
def test_what_cannot_be_honoured_is_refused(
    config: RuntimeConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ConfigError, match=request.node.callspec.id):
        resolved(config, tmp_path)


def test_api_key_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAROUSEL_API_KEY", "secret")
    assert resolved(RuntimeConfig(), tmp_path).api_key == "secret"
    assert resolved(RuntimeConfig(api_key="own"), tmp_path).api_key == "own"
