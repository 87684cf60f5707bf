"""Long prompts that are to be truncated: they are cut one after another before the ring has them, and no more
than what is left is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from carousel.client.core.request.submission import RequestOptions
from carousel.server import server_state
from carousel.server.http import body_pool
from carousel.server.http.protocol import HttpProtocol
from carousel.server.request import large_json, tokenizer
from carousel.server.request.decode import SMALL_BODY_BYTES
from carousel.server.request.tokenizer import Vocabulary
from carousel.server.server_state import ServerState
from runtime.base.errors import InvalidRequest
from runtime.settings.config import DEMO_MODEL
from runtime.text.codec import Codec
from runtime.text.selection import open_tokenizer
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import unpack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, events, http_front
from tests.harness.ring.fake_ring import WAIT_S, Answer, finish, say_nothing, spell
from tests.harness.ring.launched import wait_until
from tokenizer_proc.validation import template_message

NUM_LAST = 10
NUM_BODIES = 5
TEXT = "some words " * 20_000 + "and the last 😀 of them"
CUT: dict[str, Any] = {"truncate_prompt_tokens": NUM_LAST}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "y",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "z"},
    {"role": "user", "content": TEXT},
]
ESCAPED_CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": r'{"b": "\uD83D\uDE00"}'},
}
"""Call whose arguments are an emoji once a template reads them."""
WHOLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": TEXT, **CUT}),
    ("/v1/completions", {"prompt": ["short", TEXT], **CUT}),
    ("/v1/completions", {"prompt": TEXT, "add_special_tokens": False, **CUT}),
    ("/v1/completions", {"prompt": [7] * 60_000 + list(range(50)), **CUT}),
    ("/v1/chat/completions", {"messages": MESSAGES, **CUT}),
    ("/v1/chat/completions", {"messages": MESSAGES, "add_generation_prompt": False, **CUT}),
    ("/v1/responses", {"model": "fake", "input": MESSAGES[-1:] * 2, **CUT}),
    ("/generate", {"text": TEXT, "sampling_params": CUT}),
    ("/v1/embeddings", {"input": TEXT, **CUT}),
    ("/score", {"text_1": TEXT, "text_2": TEXT[1:], **CUT}),
    ("/rerank", {"query": "short", "documents": [TEXT, "b"], **CUT}),
)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return open_tokenizer(str(DEMO_MODEL), "", allow_special_tokens=False, has_tenants=False)


@contextmanager
def a_front(
    tmp_path: Path, answer: Answer = say_nothing, **settings: Any
) -> Iterator[tuple[Front, ServerState]]:
    states: list[ServerState] = []

    def noted(*about: Any) -> ServerState:
        states.append(ServerState(*about))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("carousel.server.main.ServerState", noted)
        with http_front(tmp_path, answer, **settings) as front:
            yield front, states[0]


def is_released(state: ServerState) -> bool:
    return not (state.bodies.num_bodies or state.kept_prompts.num_bodies or state.running.num_chars)


def ids_of(request: GenerateRequest, codec: Codec) -> list[int]:
    """Return the ids that a prompt has in the ring, whole."""
    if request.input_ids is not None:
        return [*unpack_ids(request.input_ids)]
    text, adds = request.text, request.add_special_tokens
    if request.messages is not None:
        text, adds = (
            codec.apply_chat_template(
                [template_message(message) for message in request.messages],
                add_generation_prompt=request.add_generation_prompt,
            ),
            False,
        )
    assert text is not None
    return [*codec.encode_batch([text], add_special_tokens=adds)[0]]


@pytest.mark.parametrize(("path", "body"), WHOLE)
def test_the_ring_gets_the_last_ids_of_what_it_got_before(
    tmp_path: Path, codec: Codec, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def requests(name: str) -> list[GenerateRequest]:
        (tmp_path / name).mkdir()
        with a_front(tmp_path / name) as (front, state), ExitStack() as stack:
            stack.callback(front.open_raw(path, **body).close)
            prompts = body.get("prompt", body.get("documents", ""))
            count = 2 if path == "/score" else 3 if path == "/rerank" else 1
            count = 2 if isinstance(prompts, list) and prompts[0] == "short" else count
            wait_until(lambda: len(front.ring.requests) == count, WAIT_S, "the ring has all")
            if name == "cut":
                assert state.kept_prompts.num_bytes == state.bodies.num_bytes == 0
            return list(front.ring.requests)

    cut = requests("cut")
    monkeypatch.setattr(Vocabulary, "last_ids", lambda *_: None)
    for own, whole in zip(cut, requests("whole"), strict=True):
        assert whole.sampling.truncate_prompt_tokens == NUM_LAST
        all_ids = ids_of(whole, codec)
        assert ids_of(own, codec)[-NUM_LAST:] == all_ids[-NUM_LAST:]
        if len(all_ids) > NUM_LAST * 4:
            assert (own.text, own.messages, own.sampling.truncate_prompt_tokens) == (None, None, None)
            assert len(own.input_ids or b"") == 4 * NUM_LAST


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"prompt": TEXT, "truncate_prompt_tokens": 65}, {}),  # more than the context
        ({"prompt": TEXT, "truncate_prompt_tokens": -1}, {"context_length": 1 << 20}),
        (
            {"prompt": [5] * 70_000, "return_token_ids": False, **CUT},
            {"tokenizer": "", "context_length": 1 << 20},
        ),
        # The ring refuses an id that it does not know, also where it would be cut off.
        ({"prompt": [1 << 20] + [5] * 69_999, **CUT}, {"context_length": 1 << 20}),
        ({"messages": [{"role": "nobody", "content": TEXT}], **CUT}, {}),
    ],
)
def test_what_cannot_be_cut_or_needs_not_is_left_to_the_ring(
    tmp_path: Path, body: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring refuses it by the same names as a short one, or cuts it itself."""
    monkeypatch.setattr(Tokenizer, "apply_chat_template", _refuse)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with a_front(tmp_path, **settings) as (front, state), ExitStack() as stack:
        if body.get("messages"):
            body["messages"][0]["role"] = "user"
        stack.callback(front.open_raw(path, **body).close)
        request = front.ring.wait_request()
        assert request.sampling.truncate_prompt_tokens == body["truncate_prompt_tokens"]
        assert request.text or request.messages or len(request.input_ids or b"") == 280_000
        stack.close()
        wait_until(lambda: is_released(state), WAIT_S, "all is released")


def test_a_conversation_takes_only_so_much_memory_while_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an emoji each character of a text takes four bytes, also of what the template makes of it."""
    monkeypatch.setattr(tokenizer, "MAX_CONVERSATION_BYTES", 2 * len(TEXT))
    messages: list[Any] = [[{"role": "user", "content": text}] for text in (TEXT, TEXT.replace("😀", "x"))]
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in TEXT.split("last")]}]
    with a_front(tmp_path, spell("ab")) as (front, state):
        for conversation in (messages[0], parts):
            refused = front.post("/v1/chat/completions", messages=conversation, **CUT)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "messages")
            assert "emojis" in error["message"]
        refused = front.post("/v1/responses", model="fake", input=messages[0], truncation="auto")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert not front.ring.requests
        assert front.post("/v1/chat/completions", messages=messages[1], **CUT).status_code == 200
        wait_until(lambda: is_released(state), WAIT_S, "all is released")


@pytest.mark.parametrize(
    ("first", "options"),
    [
        ({"role": "user", "content": "😀"}, {}),
        ({"role": "user", "name": "😀", "content": "x"}, {}),
        ({"role": "assistant", "content": "x", "reasoning_content": "😀"}, {}),
        ({"role": "assistant", "content": "", "tool_calls": [ESCAPED_CALL]}, {}),
        ({"role": "user", "content": "x"}, {"tools": [{"type": "function", "function": {"name": "😀"}}]}),
        ({"role": "user", "content": "x"}, {"tools": rb'[{"name": "\ud83d\ude00"}]'}),
        ({"role": "user", "content": "x"}, {"chat_template_kwargs": {"date": "😀"}}),
    ],
)
def test_one_emoji_anywhere_makes_every_character_of_a_conversation_wide(
    codec: Codec, first: dict[str, Any], options: RequestOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template makes one text of all. A conversation of 8 MiB of letters and an emoji took 32 MiB."""
    text = TEXT.replace("😀", "é")
    monkeypatch.setattr(tokenizer, "MAX_CONVERSATION_BYTES", 2 * len(text))
    conversation, vocabulary = [first, {"role": "user", "content": text}], Vocabulary(codec)
    with pytest.raises(InvalidRequest, match="emojis"):
        vocabulary.last_ids(conversation, options, NUM_LAST, 1 << 20)
    conversation[0] = {"role": "user", "content": "é"}
    assert vocabulary.last_ids(conversation, {}, NUM_LAST, 1 << 20) is not None


@pytest.mark.parametrize("tools", [b'[{"name": "\xff"}]', b"[" * 5000 + b"]" * 5000, b"[1]"])
def test_a_conversation_with_tools_that_are_no_json_is_left_to_the_ring(codec: Codec, tools: Any) -> None:
    conversation = [{"role": "user", "content": TEXT}]
    assert Vocabulary(codec).last_ids(conversation, {"tools": tools}, NUM_LAST, 1 << 20) is None


def test_a_response_s_truncation_auto_takes_a_text_of_any_length(tmp_path: Path) -> None:
    """A text of more characters than the context has was refused before it was cut."""
    body = {"model": "fake", "input": TEXT, "truncation": "auto", "max_output_tokens": 4}
    with a_front(tmp_path, spell("ab"), context_length=64) as (front, state):
        answer = front.post("/v1/responses", **body)
        assert answer.status_code == 200, answer.text
        (request,) = front.ring.requests
        assert len(request.input_ids or b"") == 4 * 60
        wait_until(lambda: is_released(state), WAIT_S, "all is released")


def _refuse(*_: Any, **__: Any) -> str:
    raise InvalidRequest("messages: not these", param="messages")


class Held:
    """Thread that cuts prompts, which waits before each one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.num_begun = 0
        last_ids = Vocabulary.last_ids

        def hold(*about: Any) -> Any:
            self.num_begun += 1
            self.release.wait(WAIT_S)
            return last_ids(*about)

        patch.setattr(Vocabulary, "last_ids", hold)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.release.set()


def test_those_who_wait_are_bodies_that_keep_others_from_being_read(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time is a text. Whoever leaves while he waits has nothing done for him."""
    num_decoded, num_left = 0, 0
    decode, lost = large_json.LargeJson.text, HttpProtocol.connection_lost

    async def note_text(*about: Any) -> str:
        nonlocal num_decoded
        num_decoded += 1
        return await decode(*about)

    def note_lost(*about: Any) -> None:
        nonlocal num_left
        num_left += 1
        lost(*about)

    monkeypatch.setattr(large_json.LargeJson, "text", note_text)
    monkeypatch.setattr(HttpProtocol, "connection_lost", note_lost)
    with a_front(tmp_path) as (front, state), ExitStack() as stack:
        callers = [front.open_raw("/v1/completions", prompt=TEXT, **CUT)]
        wait_until(lambda: held.num_begun == 1, WAIT_S, "one is cut")
        callers += [front.open_raw("/v1/completions", prompt=TEXT, **CUT) for _ in range(NUM_BODIES - 1)]
        for caller in callers:
            stack.callback(caller.close)
        wait_until(lambda: state.bodies.num_bytes > NUM_BODIES * len(TEXT), WAIT_S, "all are read")
        assert state.kept_prompts.num_bytes == state.bodies.num_bytes
        for caller in callers[1:3]:
            caller.close()
        wait_until(lambda: num_left == 2, WAIT_S, "two have left")
        assert num_decoded == 1
        assert not front.ring.requests
        held.release.set()
        wait_until(lambda: len(front.ring.requests) == NUM_BODIES - 2, WAIT_S, "the others are sent")
        wait_until(lambda: not state.bodies.num_bytes, WAIT_S, "the bodies are released")
        assert num_decoded == held.num_begun == NUM_BODIES - 2
        assert state.kept_prompts.num_bytes == 0


def test_who_leaves_while_his_prompt_is_cut_gives_his_turn_to_the_next(tmp_path: Path, held: Held) -> None:
    with a_front(tmp_path) as (front, state), ExitStack() as stack:
        with front.open_raw("/generate", text=TEXT, sampling_params=CUT):
            wait_until(lambda: held.num_begun == 1, WAIT_S, "it is cut")
        wait_until(lambda: is_released(state), WAIT_S, "all is released")
        held.release.set()
        stack.callback(front.open_raw("/generate", text=TEXT, sampling_params=CUT).close)
        front.ring.wait_request()
        assert not front.ring.aborted()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_can_be_aborted_while_its_prompt_is_cut(
    tmp_path: Path, held: Held, is_stream: bool
) -> None:
    with a_front(tmp_path, _ended_when_aborted) as (front, state):
        answers: list[Any] = []
        body = {"text": TEXT, "rid": "mine", "stream": is_stream, "sampling_params": CUT}
        asking = threading.Thread(target=lambda: answers.append(front.post("/generate", **body)))
        asking.start()
        wait_until(lambda: held.num_begun == 1, WAIT_S, "it is cut")
        assert front.post("/abort_request", rid="mine").status_code == 200
        held.release.set()
        if is_stream:  # the fake ring does not end it
            assert front.ring.wait_abort().handles == (front.ring.requests[0].handle,)
            front.ring.send(SequenceOutput(front.ring.requests[0].handle, finish=finish("abort", 0)))
        asking.join(WAIT_S)
        answer = events(answers[0])[0] if is_stream else answers[0].json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        wait_until(lambda: is_released(state), WAIT_S, "all is released")


def _ended_when_aborted(_: GenerateRequest) -> list[SequenceOutput]:
    return []


def test_the_time_that_a_prompt_waits_to_be_cut_counts(tmp_path: Path) -> None:
    with a_front(tmp_path) as (front, _), ExitStack() as stack:
        stack.callback(front.open_raw("/v1/completions", prompt=TEXT, time_limit=100, **CUT).close)
        assert 0 < front.ring.wait_request().time_limit_ms < 100_000


def test_a_prompt_that_is_refused_releases_all(tmp_path: Path) -> None:
    with a_front(tmp_path, spell("ab")) as (front, state):
        for more, status in (({"n": 2000}, 400), ({"prompt": [TEXT, 1]}, 400), ({}, 200)):
            answer = front.complete(**{"prompt": TEXT, **CUT, **more})
            assert answer.status_code == status, answer.text
            wait_until(lambda: is_released(state), WAIT_S, "all is released")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "語" * 50_000}),
        (
            "/v1/chat/completions",
            {
                "messages": MESSAGES[:1],
                "tools": [{"type": "function", "function": {"name": "f", "description": "x" * 150_000}}],
            },
        ),
    ],
)
def test_what_is_not_cut_counts_with_all_bytes_that_are_kept_of_it(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """A character of several bytes counted as one, and definitions of tools did not count."""
    settings: dict[str, Any] = {"context_length": 1 << 20, "tool_call_parser": "hermes"}
    with a_front(tmp_path, **settings) as (front, state), ExitStack() as stack:
        stack.callback(front.open_raw(path, **body, truncate_prompt_tokens=-1).close)
        front.ring.wait_request()
        assert state.kept_prompts.num_bytes >= 150_000


def test_prompts_in_progress_have_so_much_room_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of bodies that are large; they are kept until the answer has been sent."""
    monkeypatch.setattr(body_pool, "WAIT_S", 0.1)
    monkeypatch.setattr(server_state, "KEPT_BYTES", body_pool.MAX_BODY_BYTES + 3 * SMALL_BODY_BYTES // 2)
    prompt = [5] * 50_000  # 150 KB
    with a_front(tmp_path, context_length=1 << 17) as (front, state), ExitStack() as stack:
        stack.callback(front.open_raw("/v1/completions", prompt=prompt).close)
        request = front.ring.wait_request()
        assert state.kept_prompts.num_bytes > 3 * 50_000
        refused = front.complete(prompt=prompt)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "prompts_overloaded")
        assert int(refused.headers["retry-after"]) > 0
        front.ring.send(SequenceOutput(request.handle, "a", finish=finish()))
        wait_until(lambda: is_released(state), WAIT_S, "all is released")
        stack.callback(front.open_raw("/v1/completions", prompt=prompt).close)
        front.ring.wait_request(1)
