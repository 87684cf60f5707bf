"""The command line: what is refused of values."""

from __future__ import annotations

import pytest

from carousel.client.own_runtime import _flags
from carousel.trtllm.executor_settings import runtime_settings
from runtime.base.errors import ConfigError
from runtime.launcher.command_line import LISTS, parse_args
from runtime.settings.config import SETTINGS

TEXTS = [name for name, (kind, _) in SETTINGS.items() if kind is str]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_text_is_a_variable_that_is_not_set_and_not_the_default(name: str, text: str) -> None:
    """The default of most is the open one: no key, no certificate, any host."""
    option = "--" + name.replace("_", "-")
    for words in ([option, text], [f"{option}={text}"]):
        with pytest.raises(ConfigError, match=rf"^{option}: the value is empty; is a variable unset\?"):
            parse_args(words)


@pytest.mark.parametrize("words", ["--page-size=", "--seed=", "--dtype=", "-tp=", "--max-model-len="])
def test_so_is_one_in_the_place_of_a_number_or_of_a_peers_value(words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words[:-1]}: the value is empty"):
        parse_args([words])


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("words", [["a", ""], ["[]"], ['[""]'], [",", " ,"]])
def test_no_part_of_a_list_is_empty(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"the value is empty"):
        parse_args(["--" + name.replace("_", "-"), *words])


def test_keywords_of_the_library_are_no_empty_texts_either() -> None:
    for keyword in ("tokenizer", "curve_dir", "revision", "hf_token"):
        with pytest.raises(ConfigError, match=f"^{keyword}: the value is empty"):
            _flags({keyword: ""})
    for keyword in ("engine_dir", "tokenizer_dir"):
        with pytest.raises(ConfigError, match=f"^{keyword}: the value is empty"):
            runtime_settings({keyword: ""})
    assert _flags({"model": ""}) == []  # the default of LLM's own argument: the demo model
