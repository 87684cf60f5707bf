"""Command line and keywords of LLM: what is refused of values, and how switches are spelled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.command_line import parse_args
from runtime.settings.config import LISTS, PATHS, SETTINGS, from_values
from runtime.settings.keywords import LLM_SETTINGS, flags_of_keywords, given_settings
from tests.harness.cases import for_each

NAMES_A_PATH = re.compile(r"(PEM |private )?(file|directory) |serve HTTPS with the certificate in")
"""Descriptions of settings that are paths."""


def test_a_tilde_is_the_home_directory_in_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    found = {name for name, (_, meta) in SETTINGS.items() if NAMES_A_PATH.match(meta.description or "")}
    assert found == {*PATHS}
    for name in PATHS:
        config = parse_args([f"--{name.replace('_', '-')}=~/its place"])
        assert getattr(config, name) == "/home/somebody/its place"
        assert getattr(from_values({name: "~no-such-user/x"}), name) == "~no-such-user/x"
    config = parse_args(["--lora-modules", "one=~/a/b", "two=/c~/d", "--served-model-name=~/mine"])
    assert config.adapter_paths == {"one": "/home/somebody/a/b", "two": "/c~/d"}
    assert config.served_model_name == "~/mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "options.yaml").write_text("ssl-certfile: ~/certificate.pem\n")
    assert parse_args(["--config=~/options.yaml"]).ssl_certfile == f"{tmp_path}/certificate.pem"


def test_a_name_in_another_encoding_is_said_to_be_one() -> None:
    """A folder from an archive of another system, as Python is told its name."""
    with pytest.raises(ConfigError, match=r"^'--model=/m/B\\udcfccher' is not UTF-8 text; a file of such"):
        parse_args([b"--model=/m/B\xfccher".decode(errors="surrogateescape")])
    assert parse_args(["--model=/m/Bücher"]).model == "/m/Bücher"


TEXTS = [name for name, (kind, _) in SETTINGS.items() if kind is str]


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_text_is_a_variable_that_is_not_set_and_not_the_default(text: str) -> None:
    """The default of most is the open one: no key, no certificate, any host."""
    for name in TEXTS:
        option = "--" + name.replace("_", "-")
        for words in ([option, text], [f"{option}={text}"]):
            with pytest.raises(ConfigError, match=rf"^{option}: the value is empty; is a variable unset\?"):
                raise AssertionError((words, parse_args(words)))


@for_each("words", ["--page-size=", "--seed=", "--dtype=", "-tp=", "--max-model-len="])
def test_so_is_one_in_the_place_of_a_number_or_of_a_peers_value(words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words[:-1]}: the value is empty"):
        parse_args([words])


@for_each("words", [["a", ""], ["[]"], ['[""]'], [",", " ,"]])
def test_no_part_of_a_list_is_empty(words: list[str]) -> None:
    for name in LISTS:
        with pytest.raises(ConfigError, match=r"the value is empty"):
            raise AssertionError((name, parse_args(["--" + name.replace("_", "-"), *words])))


@for_each("name", LISTS)
def test_keywords_of_the_library_may_be_lists_too(name: str) -> None:
    for words in (["a", "b"], ("a", "b")):
        assert flags_of_keywords({"served_model_name": words}) == ["--served-model-name=a,b"]
    for wrong, why in (([], "empty"), (["a", ""], "empty"), (["a,b"], "'a,b'"), ([1.5], "1.5")):
        if name in LLM_SETTINGS:
            with pytest.raises(ConfigError, match=f"^{name}: .*{why}"):
                flags_of_keywords({name: wrong})


def test_keywords_of_the_library_are_no_empty_texts_either() -> None:
    for keyword in ("tokenizer", "curve_dir", "revision", "hf_token"):
        with pytest.raises(ConfigError, match=f"^{keyword}: the value is empty"):
            flags_of_keywords({keyword: ""})
    assert flags_of_keywords({"model": ""}) == []  # the default of LLM's own argument: the demo model


@for_each(
    ("words", "name", "value"),
    [
        ("--enforce-eager=false", "disable_cuda_graph", False),
        ("--enforce-eager=true", "disable_cuda_graph", True),
        ("--enable-prefix-caching=True", "disable_radix_cache", False),
        ("--enable-prefix-caching=0", "disable_radix_cache", True),
        ("--no-enable-prefix-caching=no", "disable_radix_cache", False),
        ("--disable_radix_cache=YES", "disable_radix_cache", True),
        ("--no-http=1", "no_http", True),
        ("--http=no", "no_http", True),
        ("--enable-deterministic-inference=yes", "deterministic", True),
        ("--no-enable-deterministic-inference=no", "deterministic", True),
    ],
)
def test_a_switch_takes_a_value_behind_an_equals_sign(words: str, name: str, value: bool) -> None:
    assert getattr(parse_args([words]), name) is value


@for_each(
    ("words", "reason"),
    [
        ("--enforce-eager=maybe", "--enforce-eager: expected nothing, true or false, got 'maybe'"),
        ("--enable-prefix-caching=", "--enable-prefix-caching: the value is empty"),
        ("--trust-remote-code=", "--trust-remote-code: the value is empty"),
        ("--no-trust-remote-code=maybe", "--no-trust-remote-code: expected nothing, true or false"),
        ("--help=yes", "--help: it takes no value"),
        ("--enforce-eager true", "after --enforce-eager, which is a switch: --enforce-eager=false is off"),
    ],
)
def test_any_other_value_of_a_switch_is_refused_with_the_option_as_given(words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_args(words.split())


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--version"])
    assert not ended.value.code
    assert re.fullmatch(r"carousel \d+\.\d+\S*\n", capsys.readouterr().out)


def test_none_is_a_keyword_that_is_not_given() -> None:
    """vLLM does so, whose own defaults are None."""
    names = ("served_model_name", "max_model_len", "quantization", "seed", "trust_remote_code", "enable_lora")
    assert flags_of_keywords(dict.fromkeys((*names, "enable_prefix_caching"))) == []
    for unknown in ("max_num_seq", "api_key"):
        with pytest.raises(ConfigError, match=f"^{unknown} is not a setting of LLM"):
            flags_of_keywords({unknown: None})
    assert given_settings({"queue_timeout": None, "page_size": 1}, {"queue_timeout": 0.0}) == {
        "queue_timeout": 0.0,
        "page_size": 1,
    }


@for_each(
    ("keyword", "value", "reason"),
    [
        (
            "max_num_seq",
            3,
            "max_num_seq is not a setting of LLM; did you mean max_num_seqs? Known: additional_output",
        ),
        ("trust_remote_cod", True, "; did you mean trust_remote_code? Known: "),
        ("no_such_setting", 1, "no_such_setting is not a setting of LLM; known: "),
        ("enforce_eager", "yes", "enforce_eager: expected bool, got 'yes'"),
        ("enable_prefix_caching", "yes", "enable_prefix_caching: expected bool, got 'yes'"),
        ("max_model_len", 1.5, "max_model_len: expected int, got 1.5"),
        ("dtype", "fp16", "dtype: 'fp16' is unknown; known: auto, bfloat16, float16, float32, half, float"),
        ("generation_config", "auto", "generation_config auto: "),
    ],
)
def test_a_wrong_keyword_is_named_as_it_was_given(keyword: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        flags_of_keywords({keyword: value})
    assert reason in str(refused.value)
    assert str(refused.value).startswith(keyword)


def test_the_library_has_no_defaults_of_the_model_and_no_log_of_http(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert flags_of_keywords({"generation_config": "vllm", "disable_uvicorn_access_log": True}) == []
    assert len(caplog.messages) == 2
