"""Files of options in YAML: what they may say, and that the command line goes before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.command_line import parse_args, parse_command_line
from tests.harness.cases import for_each

WHOLE = """\
# as vLLM's documentation writes one
model: tests
port: 8123
served-model-name: [a, b]
max_model_len: 8k
enable-prefix-caching: false
hf_overrides: {rope_theta: 5.0}
gpu-memory-utilization: 0.25
disable-log-requests: true
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def test_a_file_says_what_a_command_line_may_say(path: Path) -> None:
    path.write_text(WHOLE)
    words = "--port=8123 --served-model-name a b --max-model-len 8k --no-enable-prefix-caching"
    more = [
        "--hf-overrides",
        '{"rope_theta": 5.0}',
        "--gpu-memory-utilization",
        "0.25",
        "--disable-log-requests",
    ]
    expected = parse_command_line(["--model", "tests", *words.split(), *more])
    assert parse_command_line(["--config", str(path)]) == expected
    assert expected.notes, "flags that change nothing are told of"


@for_each(
    ("line", "setting", "meant"),
    [
        ("api-key: 0123", "api_key", "0123"),
        ("api-key: [0123, 1_0]", "api_key", "0123,1_0"),
        ("revision: 00123456", "revision", "00123456"),
        ("served-model-name: 2026-05-01", "served_model_name", "2026-05-01"),
        ("served-model-name: 1.10", "served_model_name", "1.10"),
        ("served-model-name: [2026-05-01, 1.10]", "served_model_name", "2026-05-01,1.10"),
        ("port: 8123", "port", 8123),
        ("mem-fraction-static: .5", "mem_fraction_static", 0.5),
        ("hf-overrides: {a: 0123, b: 1.50}", "hf_overrides", '{"a": 83, "b": 1.5}'),
    ],
)
def test_names_and_keys_are_what_is_written(path: Path, line: str, setting: str, meant: object) -> None:
    """And not the numbers and dates that YAML takes them for: 0123 would be the key 83."""
    path.write_text(f"{line}\n")
    assert getattr(parse_args(["--config", str(path)]), setting) == meant


@pytest.mark.parametrize("place", ["before", "behind"])
def test_the_command_line_goes_before_the_file(path: Path, place: str) -> None:
    path.write_text("port: 8123\nserved_model_name: a\n")
    words = ["--port", "9000"]
    file = [f"--config={path}"]
    config = parse_args([*file, *words] if place == "before" else [*words, *file])
    assert (config.port, config.served_model_name) == (9000, "a")


def test_a_preset_in_a_file_gives_defaults_only(path: Path) -> None:
    path.write_text("preset: trtllm\n")
    assert parse_args(["--config", str(path)]) == parse_args(["--preset", "trtllm"])


@for_each(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "expected options"),
        ("- port", "expected options"),
        ("port: [1", "no YAML: .*line 1"),
        ("porrt: 1", r"unknown option --porrt; did you mean --port\?"),
        ("port:", "port has no value"),
        ("port: many", "argument --port: expected a whole number, got 'many'"),
        ("port: [1, 2]", "expected a whole number"),
        ("--port: 1", "'--port' is no option; write its name without dashes"),
        ("7: 1", "7 is no option"),
        ("config: other.yaml", "a file names no other file"),
        ("enable-lora-bias: true", "adapters with biases are refused"),
        ("help: true", "--help: it takes no value"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(path: Path, text: str | None, message: str) -> None:
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        parse_args(["--config", str(path)])
    assert str(caught.value).startswith(f"--config {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [["--config"], ["--config="], ["--config", "--port", "1"]])
def test_a_file_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^--config: expected a file of options"):
        parse_args(words)
