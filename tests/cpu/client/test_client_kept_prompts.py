"""Prompts that an HTTP process keeps while they are answered, so that they can be sent again: once each."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carousel.client.core.state.request_state import RequestState
from carousel.server.footprint import Footprint
from carousel.server.http.connection_count import PipelinedCount
from carousel.server.running import RunningRequests
from runtime.wire.handle import make_handle
from runtime.wire.messages import GenerateRequest, SequenceOutput
from runtime.wire.sampling_params import SamplingParams
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import WAIT_S, finish, say_nothing
from tests.harness.ring.launched import wait_until

NUM_REQUESTS = 4
DEPTH = 6
"""Frames of an allocation by which it is known to be the ring's."""
OURS = tracemalloc.Filter(False, "*/fake_ring.py", all_frames=True)
EXPORTER = tracemalloc.Filter(False, "*/otlp_*.py", all_frames=True)
"""Not the thread that an earlier test has left, which may send traces meanwhile."""
REQUEST_BYTES = 64 << 10
"""More than a request takes beside its prompt."""
TEXT_BYTES = 1 << 20
TEXT = "a" * (TEXT_BYTES - 4) + "😀"
NUM_CALLS = 1000
CALLS = [
    {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for number in range(NUM_CALLS)
]
COMPLETION: dict[str, Any] = {"prompt": TEXT}
CUT: dict[str, Any] = {"prompt": [TEXT, TEXT[1:]], "truncate_prompt_tokens": 10}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "user", "content": "y"},
    ],
}
GENERATE: dict[str, Any] = {"text": TEXT}


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with http_front(tmp_path, say_nothing, context_length=1 << 21) as front:
        yield front


def send(
    front: Front, stack: ExitStack, path: str, body: dict[str, Any], count: int, num_prompts: int = 1
) -> None:
    """Send requests that are not answered, until the ring has them, which forgets them."""
    for _ in range(count):
        stack.callback(front.open_raw(path, **body).close)
    wait_until(lambda: len(front.ring.requests) == count * num_prompts, WAIT_S, "the ring has all")
    front.ring.requests.clear()


@pytest.mark.parametrize(
    ("path", "body", "most_bytes"),
    [
        *(
            (path, {**body, "stream": is_stream}, most_bytes)
            for path, body, most_bytes in (
                ("/v1/completions", COMPLETION, TEXT_BYTES),
                ("/generate", GENERATE, TEXT_BYTES),
                ("/v1/chat/completions", CHAT, NUM_CALLS * 150),
            )
            for is_stream in (False, True)
        ),
        ("/v1/embeddings", {"input": TEXT}, TEXT_BYTES),
    ],
)
def test_a_prompt_is_kept_once(front: Front, path: str, body: dict[str, Any], most_bytes: int) -> None:
    """A text with one emoji took five times its bytes, and a call the objects of its JSON beside its copy.
    The answer's format had an embedding's.
    """
    check_kept(front, path, body, 1, most_bytes)


@pytest.mark.parametrize("is_stream", [False, True])
def test_of_a_prompt_that_is_truncated_only_the_end_is_kept(front: Front, is_stream: bool) -> None:
    check_kept(front, "/v1/completions", {**CUT, "stream": is_stream}, 2, 0)


def check_kept(front: Front, path: str, body: dict[str, Any], num_prompts: int, most_bytes: int) -> None:
    """Check that the process keeps at most `most_bytes` of the prompts of a request in progress."""
    with ExitStack() as stack:
        send(front, stack, path, body, 1, num_prompts)
        gc.collect()
        tracemalloc.start(DEPTH)
        stack.callback(tracemalloc.stop)
        send(front, stack, path, body, NUM_REQUESTS, num_prompts)

        def kept() -> int:
            gc.collect()
            taken = tracemalloc.take_snapshot().filter_traces([OURS, EXPORTER]).statistics("filename")
            return sum(each.size for each in taken)

        # The socket may still have the last frame.
        most = NUM_REQUESTS * (most_bytes + REQUEST_BYTES) + most_bytes
        wait_until(lambda: kept() < most, 2, "the copies are gone")


def test_kept_prompts_are_known_to_be_in_use() -> None:
    """So that they start no full garbage collection."""
    state: Any = SimpleNamespace(
        bodies=SimpleNamespace(num_bytes=0),
        unread=SimpleNamespace(num_bytes=0),
        running=RunningRequests(),
        places=SimpleNamespace(num_sequences=0),
        config=SimpleNamespace(ssl_certfile=""),
    )
    server: Any = SimpleNamespace(
        num_connections=0, pipelined=PipelinedCount(), server_state=SimpleNamespace(tasks=())
    )
    footprint = Footprint(state, server)
    request: Any = object()
    with state.running.hold("a", request, ["x"], num_chars=TEXT_BYTES):
        assert footprint.now().num_bytes >= TEXT_BYTES
    assert footprint.now().num_bytes == 0


def test_texts_of_running_requests_are_counted_until_they_end(front: Front) -> None:
    """The server's own count, for each kind of prompt."""
    counts: list[int] = []
    hold = RunningRequests.hold

    def noted(self: RunningRequests, tenant: str, request: Any, labels: Any, num_chars: int = 0) -> Any:
        counts.append(num_chars)
        return hold(self, tenant, request, labels, num_chars)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(RunningRequests, "hold", noted)
        for path, body in (("/v1/completions", {"prompt": [1] * 50}), ("/generate", {"text": "x" * 70})):
            send(front, stack, path, body, 1)
        send(front, stack, "/v1/chat/completions", CHAT, 1)
    assert counts == [50, 70, 2 + 2 * NUM_CALLS]


def test_a_long_text_is_the_same_when_it_is_sent_again() -> None:
    request = GenerateRequest(make_handle(1, 2), SamplingParams(), text=TEXT)
    state = RequestState(request, request.sampling, lambda _: None)
    state.pack_text()
    assert state.request.text is None
    again = state.next_attempt(state.sequences[0], 0.0)
    assert again is not None
    assert again.text == TEXT
    state.receive([SequenceOutput(again.handle, finish=finish(completion_tokens=0))])
    assert state.completion().prompt == TEXT


@pytest.mark.parametrize("text", ["a" * TEXT_BYTES, "😀"])
def test_a_text_that_is_small_as_it_is_stays(text: str) -> None:
    request = GenerateRequest(make_handle(1, 2), SamplingParams(), text=text)
    state = RequestState(request, request.sampling, lambda _: None)
    state.pack_text()
    assert state.request.text is text
