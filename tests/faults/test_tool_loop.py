"""A loop of tool calls over a whole launch, whose engine is killed in the middle of a call."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.harness import litellm_client
from tests.harness.ring.launched import Launched, launched
from tests.harness.ring.scripted_worker import ARGUMENTS, SCRIPT_FILE

litellm = litellm_client.litellm

CODE = "".join(f'def f{number}(x):\n    return \'"{number}"\', "</tool_call>"\n' for number in range(12))
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("read", {"path": "a.py"}),
    ("write", {"path": "a.py", "text": CODE}),
]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name, _ in CALLS
]


def written(*calls: tuple[str, dict[str, Any]]) -> str:
    texts = (
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls
    )
    return "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts)


SCRIPTS = {
    "loop": [f"I look.\n{written(*CALLS)}", written(CALLS[1]), "Done: <b>"],
    "think": [f"<think>\nWhich one?\n</think>\n\n{written(CALLS[0])}", "Done."],
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    path: Path = tmp_path_factory.mktemp("script") / "script.json"
    path.write_text(json.dumps(SCRIPTS))
    arguments = (*ARGUMENTS, "--reasoning-parser", "qwen3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SCRIPT_FILE, str(path))
        with launched(*arguments, module="tests.harness.ring.scripted_worker") as launch:
            yield launch.wait_ready()


@pytest.fixture
def client(launch: Launched) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


def turn(client: openai.OpenAI, messages: list[Any], on_arguments: Any = lambda: None) -> Any:
    """Stream an answer; call `on_arguments` when the first piece of arguments has come."""
    with client.chat.completions.stream(model="carousel-demo", messages=messages, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta" and on_arguments is not None:
                on_arguments()
                on_arguments = None
        return stream.get_final_completion().choices[0]


def loop(
    client: openai.OpenAI, script: str, on_arguments: Any = lambda: None
) -> tuple[list[Any], str | None]:
    """Call tools until the model calls none; the calls that it made, and what it said at last."""
    messages: list[Any] = [{"role": "user", "content": f"script: {script}"}]
    made: list[Any] = []
    while True:
        choice = turn(client, messages, on_arguments)
        messages.append(choice.message.model_dump(exclude={"parsed", "refusal"}, exclude_none=True))
        for call in choice.message.tool_calls or ():
            made.append((call.function.name, json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
        if choice.finish_reason != "tool_calls":
            return made, choice.message.content


def test_a_loop_of_three_turns(client: openai.OpenAI) -> None:
    assert loop(client, "loop") == ([*CALLS, CALLS[1]], "Done: <b>")


def test_calls_behind_reasoning(client: openai.OpenAI) -> None:
    assert loop(client, "think") == ([CALLS[0]], "Done.")
    answer = client.chat.completions.create(
        model="carousel-demo", messages=[{"role": "user", "content": "script: think"}], tools=TOOLS
    )
    message: Any = answer.choices[0].message
    assert message.reasoning_content == "Which one?"
    usage: Any = answer.usage
    assert 4 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens - 10


def test_the_engine_may_be_killed_in_the_middle_of_a_call(launch: Launched, client: openai.OpenAI) -> None:
    before = launch.pid_of("scheduler")
    made = loop(client, "loop", lambda: os.kill(launch.pid_of("scheduler"), signal.SIGKILL))
    assert made == ([*CALLS, CALLS[1]], "Done: <b>")
    assert launch.pid_of("scheduler") != before


def test_litellm_goes_on_when_the_engine_is_killed(launch: Launched, litellm: Any) -> None:
    before = launch.pid_of("scheduler")
    messages: list[Any] = [{"role": "user", "content": "script: loop"}]
    made: list[Any] = []
    while True:
        chunks = []
        for chunk in litellm.completion(
            model="openai/carousel-demo",
            api_base=f"{launch.url}/v1",
            api_key="none",
            messages=messages,
            extra_body={"tools": TOOLS},
            stream=True,
            max_retries=0,
        ):
            chunks.append(chunk)
            if len(chunks) == 30 and not made:
                os.kill(before, signal.SIGKILL)
        choice: Any = litellm.stream_chunk_builder(chunks).choices[0]
        messages.append(choice.message.model_dump())
        for call in choice.message.tool_calls or ():
            made.append((call.function.name, json.loads(call.function.arguments)))
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "ok"}]}
            )
        if choice.finish_reason != "tool_calls":
            break
    assert (made, choice.message.content) == ([*CALLS, CALLS[1]], "Done: <b>")
    assert launch.pid_of("scheduler") != before
