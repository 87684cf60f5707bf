"""Histories of agents in chat templates: tool calls in the form that templates expect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import RequestOptions, Submission
from runtime.base.errors import InvalidRequest
from runtime.text.special_text import ShieldedText
from runtime.text.tokenizer import Tokenizer
from runtime.wire.handle import make_handle
from runtime.wire.messages import ChatMessage, GenerateRequest
from tests.harness.models import special_tokenizers as made
from tokenizer_proc.validation import Validator, template_message

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|{{ m.tool_call_id }}"
    "{% for call in m.tool_calls or [] %}|{{ call.function.name }}"
    "{% if call.function.arguments is mapping %}"
    "{% for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}"
    "{% else %} {{ call.function.arguments }}{% endif %}{% endfor %}]{% endfor %}"
)


@pytest.fixture(scope="module")
def loaded() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer._chat_template._wrapper.chat_template = TEMPLATE
    return tokenizer


def call(arguments: Any) -> dict[str, Any]:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Ulm", "days": 2}', " city=Ulm days=2"),
        ({"city": "Ulm"}, " city=Ulm"),
        ("", ""),
        ("not JSON", " not JSON"),
        ("[1]", " [1]"),
        ('{"a": ' * 5000, " " + '{"a": ' * 5000),
    ],
)
def test_arguments_are_an_object_where_they_are_the_json_of_one(
    loaded: Tokenizer, arguments: Any, shown: str
) -> None:
    text = loaded.apply_chat_template([call(arguments)], add_generation_prompt=False)
    assert text == f"[assistant||||f{shown}]"


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("name", ["x", "<|im_start|>"])
def test_arguments_that_are_nested_too_deeply_are_refused_in_plain_words(is_text: bool, name: str) -> None:
    """By the template, and by what marks special tokens before it."""
    nested = "[" * 900 + "]" * 900
    arguments = f'{{"{name}": {nested}}}' if is_text else {name: msgspec.json.decode(nested)}
    tokenizer = made.byte_level()
    tokenizer._chat_template._wrapper.chat_template = "{{ messages[0].tool_calls[0] | tojson }}"
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        tokenizer.apply_chat_template([call(arguments)], add_generation_prompt=False)
    assert caught.value.param == "messages"
    assert "recursion" not in caught.value.message


def test_a_result_and_own_roles_reach_the_template(loaded: Tokenizer) -> None:
    messages = [{"role": "my-role", "content": "x", "tool_call_id": "c1", "reasoning_content": "hm"}]
    assert loaded.apply_chat_template(messages, add_generation_prompt=False) == "[my-role|x|hm|c1]"


def test_special_tokens_in_arguments_are_characters(loaded: Tokenizer) -> None:
    spelled = loaded.vocabulary[min(loaded.special_ids)]
    text = loaded.apply_chat_template([call({"a": spelled})], add_generation_prompt=False)
    (ids,) = loaded.encode_batch([text], add_special_tokens=False)
    assert not loaded.special_ids.intersection(ids.tolist())


def test_special_tokens_are_added_around_marked_text_too(loaded: Tokenizer) -> None:
    spelled = loaded.vocabulary[min(loaded.special_ids)]
    text = loaded.apply_chat_template([call({"a": spelled})], add_generation_prompt=False)
    (plain,) = loaded.encode_batch([text], add_special_tokens=False)
    (ids,) = loaded.encode_batch([text], add_special_tokens=True)
    around = loaded.encode_batch(["a"], add_special_tokens=True)[0].tolist()
    alone = loaded.encode_batch(["a"], add_special_tokens=False)[0].tolist()
    start = around.index(alone[0])
    assert ids.tolist() == [*around[:start], *plain.tolist(), *around[start + len(alone) :]]


@pytest.mark.parametrize(
    "further",
    [b"junk", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"role": "system"}), b"\x81\xa1a" * 5000],
)
def test_a_map_that_is_none_is_refused(further: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        template_message(ChatMessage("user", "x", "", further))
    assert refused.value.param == "messages"


def test_further_fields_come_out_as_they_went_in() -> None:
    fields = {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}], "tool_call_id": "c"}
    message = ChatMessage("tool", "x", "n", msgspec.msgpack.encode(fields))
    assert template_message(message) == {"role": "tool", "content": "x", "name": "n", **fields}


# -- definitions of tools ------------------------------------------------------------------------------------

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
]


def with_template(template: str) -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer._chat_template._wrapper.chat_template = template
    for found in ("_calls", "variables"):  # found out of the template before
        tokenizer._chat_template.__dict__.pop(found, None)
    return tokenizer


def test_tools_are_a_variable_of_the_template_in_their_order() -> None:
    tokenizer = with_template(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}"
    )
    user = [{"role": "user", "content": "x"}]
    shown = '{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}'
    assert tokenizer.apply_chat_template(user, tools=TOOLS) == f"{shown}x"
    assert tokenizer.apply_chat_template(user) == "x"


def test_a_template_that_shows_no_tools_is_given_none() -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    user = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match=r"^tools: the model.s chat template shows none") as error:
        tokenizer.apply_chat_template(user, tools=TOOLS)
    assert error.value.param == "tools"
    assert tokenizer.apply_chat_template(user) == "x"


def test_special_tokens_in_tools_are_text() -> None:
    tokenizer = with_template("<|im_start|>{{ tools[0].function.description }}")
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_start|>"}}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=tools)
    assert isinstance(text, ShieldedText)


def test_a_template_that_refuses_tools_is_said_to() -> None:
    tokenizer = with_template("{% if tools %}{{ raise_exception('no tools') }}{% endif %}x")
    with pytest.raises(
        InvalidRequest, match=r"^tools: the model's chat template refuses this: no tools"
    ) as error:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=TOOLS)
    assert error.value.param == "tools"


def test_tools_that_are_nested_too_deeply_are_refused_by_name() -> None:
    tokenizer = with_template("{{ tools | tojson }}")
    nested: Any = "<|im_start|>"
    for _ in range(900):
        nested = [nested]
    with pytest.raises(InvalidRequest, match=r"^tools: ") as error:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=[{"a": nested}])
    assert error.value.param == "tools"


def test_what_a_template_would_leave_out_of_a_history_is_refused_by_name() -> None:
    tokenizer = with_template("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
    user = {"role": "user", "content": "x"}
    assert tokenizer.apply_chat_template([user]) == "x"
    with pytest.raises(InvalidRequest, match="does not show tool calls") as error:
        tokenizer.apply_chat_template([user, call({})])
    assert error.value.param == "messages[1].tool_calls"
    with pytest.raises(InvalidRequest, match="does not show results of tools") as error:
        tokenizer.apply_chat_template([user, {"role": "tool", "content": "y"}])
    assert error.value.param == "messages[1].role"


DEEPSEEK = (
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}[{{ call.function.name + ' ' + call.function.arguments }}]{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""A template that wants arguments as text."""


@pytest.mark.parametrize("arguments", ['{"a":  1}', {"a": 1}])
def test_calls_have_the_form_that_the_template_shows(arguments: Any) -> None:
    tokenizer = with_template(DEEPSEEK)
    text = tokenizer.apply_chat_template(
        [call(arguments), {"role": "tool", "content": "y"}], add_generation_prompt=False
    )
    assert text == ('[f {"a":  1}]y' if isinstance(arguments, str) else '[f {"a": 1}]y')


def test_a_template_that_raises_says_itself_what_it_does_not_take() -> None:
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "y"}])


def test_tools_travel_as_json_and_have_their_own_bound() -> None:
    conversation = [{"role": "user", "content": "x"}]
    handle = make_handle(1, 1)

    def request(tools: Any, prompt: Any = conversation) -> GenerateRequest:
        return build_request(handle, Submission(prompt, options=RequestOptions(tools=tools)))

    validator = Validator(100, 100)
    assert validator.tools(request(msgspec.json.encode(TOOLS))) == TOOLS
    assert validator.tools(request(b"")) == []
    large = msgspec.json.encode(
        [{"type": "function", "function": {"name": "f", "description": "x" * 1000000}}]
    )
    assert validator.tools(request(large)) == msgspec.json.decode(large)
    assert validator.tools(request(TOOLS)) == TOOLS
    for wrong in ("x", 7, b" " * (1 << 20) + b"[]"):
        with pytest.raises(InvalidRequest, match="tools must be a list of definitions, or its JSON"):
            request(wrong)
    with pytest.raises(InvalidRequest, match="tools is for a prompt of chat messages"):
        request(b"[]", "text")
    for wrong in (b"[1]", b"{}", b"["):
        with pytest.raises(InvalidRequest, match=r"^tools: no list of objects"):
            validator.tools(request(wrong))
