"""Reasoning over HTTP: how an answer begins is how the prompt of its template ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, events, http_front
from tests.harness.ring.fake_ring import finish, output

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif may_think %}assistant:{% else %}<think>\n{% endif %}"
)
ANSWER = "Hm.\n</think>\n\nHi"


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    return [output(request, ANSWER, finish=finish("stop", len(ANSWER)))]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    run_dir = tmp_path_factory.mktemp("run")
    with http_front(run_dir, answer, chat_template=str(template), reasoning_parser="qwen3") as front:
        yield front


def message(front: Front, **body: Any) -> tuple[str | None, str | None]:
    """Reasoning and content, which a stream must say alike."""
    got = front.chat(**body).json()["choices"][0]["message"]
    assert got["reasoning"] == got["reasoning_content"]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(front.chat(stream=True, **body))[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (got["reasoning"] or "")
    assert "".join(delta.get("content", "") for delta in deltas) == (got["content"] or "")
    return got["reasoning"], got["content"]


def test_variables_of_the_launch_hold_where_a_request_gives_none(tmp_path: Path) -> None:
    """--default-chat-template-kwargs of vLLM and SGLang: a server that thinks only where it is asked to."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = {"chat_template": str(tmp_path / "chat.jinja"), "reasoning_parser": "qwen3"}
    given = '{"enable_thinking": false, "other": 1}'
    with http_front(tmp_path, answer, default_chat_template_kwargs=given, **settings) as front:
        assert message(front) == (None, ANSWER)
        assert message(front, chat_template_kwargs={"may_think": True}) == (None, ANSWER)
        assert message(front, chat_template_kwargs={"enable_thinking": True}) == ("Hm.", "Hi")
        assert message(front, reasoning_effort="high") == ("Hm.", "Hi")
        talk = [{"role": "user", "content": "x"}]
        short, long = (
            front.post("/tokenize", messages=talk, chat_template_kwargs=variables).json()["count"]
            for variables in ({"enable_thinking": True}, None)
        )
        assert short < long


def test_variables_of_the_launch_hold_in_the_other_apis_with_messages(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = {"chat_template": str(tmp_path / "chat.jinja"), "reasoning_parser": "qwen3"}
    given = '{"enable_thinking": false}'
    with http_front(tmp_path, answer, default_chat_template_kwargs=given, **settings) as front:
        talk = [{"role": "user", "content": "x"}]
        counts = []
        for fields, thinks in (
            ({}, False),
            ({"thinking": {"type": "disabled"}}, False),
            ({"thinking": {"type": "adaptive"}}, True),
            ({"output_config": {"effort": "high"}}, True),
            ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ):
            got = front.post("/v1/messages", messages=talk, max_tokens=30, **fields).json()
            assert (got["content"][0]["type"] == "thinking") is thinks, fields
            counted = front.post("/v1/messages/count_tokens", messages=talk, **fields).json()
            counts.append((thinks, counted["input_tokens"]))
        assert len(set(counts)) == 2, counts
        for fields, thinks in (
            ({}, False),
            ({"reasoning": {"effort": "high"}}, True),
            ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ):
            got = front.post("/v1/responses", input="x", **fields).json()
            assert (got["output"][0]["type"] == "reasoning") is thinks, fields


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, ("Hm.", "Hi")),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ("Hm.", "Hi")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, (None, ANSWER)),
        ({"chat_template_kwargs": {"may_think": True}}, (None, ANSWER)),
        # A message that is continued is in reasoning where it has opened it, and not closed it.
        (
            {
                "continue_final_message": True,
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "<think>\nSo"},
                ],
            },
            ("Hm.", "Hi"),
        ),
        (
            {
                "continue_final_message": True,
                "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}],
            },
            (None, ANSWER),
        ),
    ],
)
def test_an_answer_begins_as_its_prompt_ends(front: Front, body: dict[str, Any], expected: Any) -> None:
    assert message(front, **body) == expected


def test_what_the_template_refuses_is_said_by_the_request_itself(front: Front) -> None:
    """A variable that cannot be set is found out by the tokenizer, not by the look at the prompt's end."""
    assert front.chat(chat_template_kwargs={"messages": []}).status_code == 200


def test_other_paths_give_all_of_it_as_text(front: Front) -> None:
    assert front.complete().json()["choices"][0]["text"] == ANSWER
    assert front.post("/generate", text="x").json()["text"] == ANSWER


# -- effort and budget ---------------------------------------------------------------------------------------


def variables_of(tmp_path: Path, template: str, **body: Any) -> Any:
    """Return what the template gets of a chat, or the error."""
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}" + template)
    asked: list[GenerateRequest] = []

    def say(request: GenerateRequest) -> list[SequenceOutput]:
        asked.append(request)
        return answer(request)

    with http_front(tmp_path, say, chat_template=str(path), reasoning_parser="qwen3") as front:
        got = front.chat(**body).json()
    if "error" in got:
        return got["error"]["param"]
    kwargs = asked[-1].template_kwargs
    return msgspec.msgpack.decode(kwargs) if kwargs else {}


SWITCH = "{% if enable_thinking %}<think>{% endif %}"
EFFORT = "{{ reasoning_effort }}"
DEEPSEEK = "{% if thinking is defined and thinking %}<think>{% endif %}"
PROSE = "{# reasoning_effort #}thinking {{ messages[0].thinking }}"


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        (SWITCH, "high", {"enable_thinking": True}),
        (SWITCH, "none", {"enable_thinking": False}),
        (DEEPSEEK, "low", {"thinking": True}),
        (EFFORT, "low", {"reasoning_effort": "low"}),
        (EFFORT, "none", {"reasoning_effort": "none"}),
        (EFFORT + SWITCH, "none", {"enable_thinking": False}),
        (EFFORT + SWITCH, "minimal", {"enable_thinking": True, "reasoning_effort": "minimal"}),
        ("", "none", {}),
        ("", "high", {}),
        (PROSE, "high", {}),
    ],
)
def test_an_effort_is_what_the_template_knows_of_it(
    tmp_path: Path, template: str, effort: str, expected: Any
) -> None:
    assert variables_of(tmp_path, template, reasoning_effort=effort) == expected


def test_variables_of_the_request_win_over_its_effort(tmp_path: Path) -> None:
    body = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "x": 1}}
    assert variables_of(tmp_path, SWITCH, **body) == {"enable_thinking": False, "x": 1}


@pytest.mark.parametrize(
    "settings",
    [{"reasoning_parser": "none"}, {"reasoning_parser": "gpt_oss"}, {"grammar_backend": "none"}],
)
def test_a_budget_that_cannot_be_held_is_refused_by_name(tmp_path: Path, settings: Any) -> None:
    given = {"reasoning_parser": "qwen3", **settings}
    with http_front(tmp_path, answer, **given) as front:
        error = front.chat(thinking_token_budget=5).json()["error"]
    assert error["param"] == "thinking_token_budget"
    assert error["message"].startswith("thinking_token_budget: ")


def test_only_a_chat_has_a_budget(front: Front) -> None:
    assert front.complete(thinking_token_budget=5).json()["error"]["param"] == "thinking_token_budget"
