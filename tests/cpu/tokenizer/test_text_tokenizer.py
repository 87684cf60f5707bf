"""runtime.text.tokenizer: what is beside a checkpoint, read without torch."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest

from runtime.base.errors import ConfigError, InvalidRequest, ModelError
from runtime.settings.config import DEMO_MODEL
from runtime.text import tokenizer
from runtime.text.selection import open_tokenizer
from runtime.text.tokenizer import Tokenizer
from tokenizer_proc.validation import check_template_defaults

TEXTS = ["def main() -> None:\n    pass\n", "naïve 漢字 😀\u200d🔥", "", "a" * 500]


@pytest.fixture
def copy_of_demo(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    return tmp_path


def test_loading_and_using_a_tokenizer_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from runtime.text import tokenizer, incremental\n"
        f"loaded = tokenizer.load(Path({str(DEMO_MODEL)!r}))\n"
        "loaded.encode_batch(['x'])\n"
        "loaded.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "incremental.DecoderFactory(loaded).open([]).push(5)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DEMO_MODEL.parent.parent)


def test_a_batch_encodes_like_its_texts_one_by_one(demo: Tokenizer) -> None:
    batch = demo.encode_batch(TEXTS)
    assert all(ids.dtype == np.int32 for ids in batch)
    for text, ids in zip(TEXTS, batch, strict=True):
        assert np.array_equal(ids, demo.encode_batch([text])[0])
        assert demo.decode(ids.tolist()) == text


def test_special_ids_are_those_that_decoding_skips(demo: Tokenizer) -> None:
    assert demo.special_ids == {0, 1, 2}
    assert demo.decode([0, 1, 2]) == ""
    assert demo.decode([0], skip_special_tokens=False) == "<|endoftext|>"
    assert demo.vocab_size == 4096


def test_token_strings_are_spelled_as_in_the_vocabulary(demo: Tokenizer) -> None:
    ids = demo.encode_batch(["def f"])[0].tolist()
    assert demo.token_strings([*ids, 99999]) == [*(demo.vocabulary[token] for token in ids), ""]
    assert "\u0120" in "".join(demo.token_strings(ids))


def test_truncation_and_padding_of_the_file_are_switched_off(copy_of_demo: Path) -> None:
    file = copy_of_demo / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    content["padding"] = {
        "strategy": {"Fixed": 5},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    file.write_text(json.dumps(content))
    loaded = tokenizer.load(copy_of_demo)
    assert len(loaded.encode_batch([TEXTS[0]])[0]) > 5
    assert len(loaded.encode_batch(["x"])[0]) == 1


def test_the_demo_template_writes_a_conversation_as_one_source_file(demo: Tokenizer) -> None:
    messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def f(x):"}]
    assert demo.apply_chat_template(messages) == "<|endoftext|>import os\ndef f(x):"
    ended = demo.apply_chat_template(messages, add_generation_prompt=False)
    assert ended == "<|endoftext|>import os\ndef f(x):<|endoftext|>"


def test_a_template_file_replaces_the_models(copy_of_demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}")
    loaded = tokenizer.load(copy_of_demo, chat_template=file)
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]) == "[user]hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for message in messages %}",
    ],
)
def test_whatever_a_template_raises_is_an_invalid_request(
    copy_of_demo: Path, tmp_path: Path, template: str
) -> None:
    file = tmp_path / "bad.jinja"
    file.write_text(template)
    loaded = tokenizer.load(copy_of_demo, chat_template=file)
    with pytest.raises(InvalidRequest) as caught:
        loaded.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"


VARIABLES = (
    "{% for message in messages %}{{ message.content }};{% endfor %}"
    "{% if style is defined %}{{ style.upper() }}{{ 1 // size }}{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def variables(copy_of_demo: Path, tmp_path: Path) -> Tokenizer:
    file = tmp_path / "variables.jinja"
    file.write_text(VARIABLES)
    return tokenizer.load(copy_of_demo, chat_template=file)


HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well "}]


def test_a_template_gets_further_variables(variables: Tokenizer) -> None:
    kwargs = {"style": "loud", "size": 1}
    assert variables.apply_chat_template(HI, template_kwargs=kwargs) == "hi;well ;LOUD1>"


@pytest.mark.parametrize("kwargs", [{"style": 3}, {"style": "a", "size": 0}, {"style": "a", "size": "b"}])
def test_a_variable_that_the_template_does_not_take_is_at_fault_not_the_messages(
    variables: Tokenizer, kwargs: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest, match="refuses") as caught:
        variables.apply_chat_template(HI, template_kwargs=kwargs)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "chat_template",
        "tokenize",
        "self",
        "eos_token",
        "padding",
    ],
)
def test_the_template_s_own_arguments_cannot_be_set_as_variables(variables: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        variables.apply_chat_template(HI, template_kwargs={name: 1})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(("name", "value"), [("messages", []), ("eos_token", "a"), ("style", 3)])
def test_a_launch_is_not_begun_with_variables_that_every_conversation_is_refused_for(
    variables: Tokenizer, name: str, value: Any
) -> None:
    """Each request had a 400 about a field that it did not have."""
    with pytest.raises(ConfigError, match=r"^default_chat_template_kwargs: "):
        check_template_defaults(variables, {name: value})


def test_variables_of_a_launch_are_not_at_fault_where_the_template_refuses_any_conversation(
    copy_of_demo: Path, tmp_path: Path
) -> None:
    file = tmp_path / "strict.jinja"
    file.write_text("{{ raise_exception('begin with a system message') }}")
    check_template_defaults(tokenizer.load(copy_of_demo, chat_template=file), {"style": "loud"})


def test_a_final_message_is_continued_where_it_ends(variables: Tokenizer) -> None:
    prompt = variables.apply_chat_template(HI, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "hi;well "


def test_a_final_message_cannot_be_continued_and_answered(variables: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="add_generation_prompt") as caught:
        variables.apply_chat_template(HI, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_template_that_drops_the_final_message_cannot_continue_it(
    copy_of_demo: Path, tmp_path: Path
) -> None:
    file = tmp_path / "drops.jinja"
    file.write_text("{{ messages[0].content }}")
    loaded = tokenizer.load(copy_of_demo, chat_template=file)
    with pytest.raises(InvalidRequest) as caught:
        loaded.apply_chat_template(HI, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    assert "well" not in caught.value.message


def test_the_prompt_is_what_transformers_renders(demo: Tokenizer) -> None:
    all_options: list[dict[str, Any]] = [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ]
    for options in all_options:
        expected = demo._open_wrapper().apply_chat_template(HI, tokenize=False, **options)
        assert demo.apply_chat_template(HI, **options) == expected


def test_a_prepared_file_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / f"prepared.{os.getpid()}")
    for prepared in (tmp_path / "prepared.json", tmp_path / "missing" / "prepared.json"):
        assert tokenizer.load(DEMO_MODEL, prepared=prepared).encode_batch(["import os"])
    assert not list(tmp_path.iterdir())


def test_the_demo_models_file_alone_is_its_tokenizer(demo: Tokenizer) -> None:
    """Tests in tests/unit read it so, where the import of transformers took a twelfth of the time."""
    alone = tokenizer.load(DEMO_MODEL, prepared=DEMO_MODEL / "tokenizer.json")
    for special in (True, False):
        wanted, found = (each.encode_batch(TEXTS, add_special_tokens=special) for each in (demo, alone))
        assert [ids.tolist() for ids in found] == [ids.tolist() for ids in wanted]
    assert (alone.vocabulary, alone.special_ids) == (demo.vocabulary, demo.special_ids)


def test_who_loads_it_after_others_gets_the_same_without_transformers(
    copy_of_demo: Path, tmp_path: Path
) -> None:
    """Though tokenizer_config.json adds a token of which tokenizer.json knows nothing."""
    file = copy_of_demo / "tokenizer_config.json"
    added = {"content": "<|more|>", "special": True, "normalized": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": {"4096": added}}))
    prepared = tmp_path / "run" / "tokenizer.json"
    prepared.parent.mkdir()
    first, again = (tokenizer.load(copy_of_demo, prepared=prepared) for _ in range(2))
    assert os.listdir(prepared.parent) == ["tokenizer.json"]
    texts = [*TEXTS, "a<|more|>b"]
    ids = [each.tolist() for each in first.encode_batch(texts)]
    assert [each.tolist() for each in again.encode_batch(texts)] == ids
    assert 4096 in ids[-1]
    assert [again.decode(each) for each in ids] == [*TEXTS, "ab"]
    assert again.vocabulary == first.vocabulary
    assert again.special_ids == first.special_ids == {0, 1, 2, 4096}
    assert again.apply_chat_template(HI) == first.apply_chat_template(HI)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from runtime.text import tokenizer, incremental\n"
        f"loaded = tokenizer.load(Path('nowhere'), prepared=Path({str(prepared)!r}))\n"
        "loaded.encode_batch(['x'])\n"
        "incremental.DecoderFactory(loaded).open([]).push(5)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DEMO_MODEL.parent.parent)


def test_messages_without_a_template_are_refused(copy_of_demo: Path) -> None:
    (copy_of_demo / "chat_template.jinja").unlink()
    loaded = tokenizer.load(copy_of_demo)
    assert not loaded.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        loaded.apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_missing_or_broken_file_is_a_model_error_that_names_it(copy_of_demo: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="chat template"):
        tokenizer.load(copy_of_demo, chat_template=tmp_path / "nowhere.jinja")
    (copy_of_demo / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        tokenizer.load(copy_of_demo)


def test_a_panic_of_the_library_is_an_error_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # as pyo3 names and derives it
        pass

    class Panics:
        def encode_batch_fast(self, *_: object, **__: object) -> object:
            raise PanicException("byte index 1 is not a char boundary")

        decode = encode_batch_fast

    loaded = tokenizer.load(DEMO_MODEL)
    monkeypatch.setattr(loaded, "_backend", Panics())
    with pytest.raises(RuntimeError, match="panicked"):
        loaded.encode_batch(["a"])
    with pytest.raises(RuntimeError, match="panicked"):
        loaded.decode([5])


def test_the_time_of_a_text_does_not_tell_whether_others_have_sent_its_words() -> None:
    """A word of 250 letters takes 40 us if the library knows it, and 57 if not."""
    ratios = []
    for has_tenants in (False, True):
        opened = open_tokenizer(str(DEMO_MODEL), has_tenants=has_tenants)
        draw = random.Random(1)
        sent, new = (["".join(draw.choices(ascii_lowercase, k=250)) for _ in range(200)] for _ in range(2))
        for word in sent:
            opened.encode_batch([word])
        costs: dict[bool, list[int]] = {True: [], False: []}
        known = frozenset(sent)
        for word in draw.sample([*sent, *new], 400):
            began = time.thread_time_ns()
            opened.encode_batch([word])
            costs[word in known].append(time.thread_time_ns() - began)
        ratios.append(median(costs[False]) / median(costs[True]))
    assert ratios[1] < 1 + (ratios[0] - 1) / 2, ratios
