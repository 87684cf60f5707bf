"""The client library with all processes behind it and the demo model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from carousel import LLM, AsyncClient, BeamSearchParams, Client, InvalidRequest, SamplingParams
from runtime.ring.endpoints import Endpoints
from runtime.wire.status_page import StatusPage
from tests.harness.ring.launched import ROOT, Launched, is_alive, wait_until

PROMPTS = [f"def function_{number}(" for number in range(20)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def launch(demo_launch: Launched) -> Launched:
    return demo_launch


@pytest.fixture(scope="module")
def client(launch: Launched) -> Iterator[Client]:
    with Client(launch.run_dir) as client:
        yield client


def num_running(launch: Launched) -> int:
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    try:
        return page.read("scheduler").num_running
    finally:
        page.close()


def test_a_batch_gives_what_each_prompt_gives_alone_in_their_order(client: Client) -> None:
    together = client.generate(PROMPTS, GREEDY, timeout=60)
    alone = [client.generate(prompt, GREEDY, timeout=60) for prompt in PROMPTS[:4]]
    assert [each.token_ids for each in together[:4]] == [each.token_ids for each in alone]
    assert all(each.usage.completion_tokens == len(each.token_ids) for each in together)


def test_a_batch_longer_than_the_servers_queue_is_not_refused(client: Client) -> None:
    params = SamplingParams(max_tokens=1)
    assert len(client.generate([[number + 1] for number in range(100)], params, timeout=60)) == 100


def test_a_stream_adds_up_to_the_completion(client: Client) -> None:
    stream = client.stream(PROMPTS[0], GREEDY, timeout=60)
    text = "".join(delta.text for delta in stream)
    completion = client.generate(PROMPTS[0], GREEDY, timeout=60)
    assert text == completion.text == stream.state.text
    assert stream.state.token_ids == completion.token_ids


def test_a_conversation_is_rendered_by_the_chat_template(client: Client) -> None:
    completion = client.generate([{"role": "user", "content": "import os\n"}], GREEDY, timeout=60)
    assert completion.usage.completion_tokens > 0


def test_chat_is_the_answer_of_the_http_server_to_the_same_conversation(
    client: Client, launch: Launched
) -> None:
    conversations = [[{"role": "developer", "content": "import os"}], [{"role": "user", "content": "def f("}]]
    together = client.chat(conversations, GREEDY, timeout=60)
    assert [each.token_ids for each in together] == [
        client.chat(messages, GREEDY, timeout=60).token_ids for messages in conversations
    ]
    body = {"model": "demo", "messages": conversations[0], "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{launch.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == together[0].text
    assert answer["usage"]["prompt_tokens"] == together[0].usage.prompt_tokens


def test_chat_goes_on_with_a_message_shows_tools_and_refuses_by_name(client: Client) -> None:
    messages = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "def f("}]
    written = "<|endoftext|>import os\ndef f("
    went_on = client.chat(messages, GREEDY, continue_final_message=True, timeout=60)
    assert went_on.text == client.generate(written, GREEDY, add_special_tokens=False, timeout=60).text
    tools = [{"type": "function", "function": {"name": "f"}}]
    num_more = client.chat(messages, GREEDY, tools=tools, timeout=60).usage.prompt_tokens
    assert num_more > client.chat(messages, GREEDY, timeout=60).usage.prompt_tokens + 10
    with pytest.raises(InvalidRequest) as caught:
        client.chat([{"role": "user", "content": 7}], GREEDY, timeout=60)
    assert caught.value.param == "messages[0].content"
    with pytest.raises(TypeError, match="chat_template"):
        client.chat(messages, GREEDY, chat_template="x", timeout=60)  # type: ignore[call-overload]


def test_leaving_and_aborting_free_the_row(client: Client, launch: Launched) -> None:
    for _ in client.stream(PROMPTS[0], ENDLESS, timeout=60):
        break
    wait_until(lambda: num_running(launch) == 0, 2.0, "the row is free after leaving")
    stream = client.stream(PROMPTS[0], ENDLESS, timeout=60)
    next(stream)
    client.abort(stream)
    assert list(stream)[-1].finish_reason == "abort"
    wait_until(lambda: num_running(launch) == 0, 2.0, "the row is free after an abort")


def test_the_ring_refuses_by_the_callers_argument(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate([1] * 5000, timeout=60)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_server_info_and_flush_cache_are_answered(client: Client) -> None:
    assert isinstance(client.server_info(), dict)
    client.flush_cache()


def test_async_calls_run_together_and_a_cancelled_one_frees_its_row(launch: Launched) -> None:
    async def main() -> None:
        async with AsyncClient(launch.run_dir) as client:
            together = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in PROMPTS[:8]))
            again = await client.generate(PROMPTS[3], GREEDY)
            chat = await client.chat([{"role": "user", "content": "x"}], GREEDY)
            assert chat.usage.completion_tokens == 12
            assert together[3].token_ids == again.token_ids
            call = asyncio.create_task(client.generate(PROMPTS[0], ENDLESS))
            while num_running(launch) == 0:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(asyncio.wait_for(main(), 60))
    wait_until(lambda: num_running(launch) == 0, 2.0, "the row is free after a cancellation")


def test_a_client_process_that_dies_frees_its_rows(launch: Launched) -> None:
    code = (
        "import sys; from carousel import Client, SamplingParams\n"
        "stream = Client(sys.argv[1]).stream('x', SamplingParams(max_tokens=1500, ignore_eos=True))\n"
        "next(stream); print('running', flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(launch.run_dir)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"running\n"
        child.kill()
        wait_until(lambda: num_running(launch) == 0, 5.0, "the rows of a dead client are free")


def check_beam_search(llm: LLM) -> None:
    """Check that vLLM's call gives the hypotheses that a search by `generate` has."""
    asked = BeamSearchParams(beam_width=2, max_tokens=6, length_penalty=0.5)
    ids = llm.get_tokenizer()(PROMPTS[0])["input_ids"]
    found = llm.beam_search([PROMPTS[0], {"prompt_token_ids": ids}], asked, timeout=60)
    own = SamplingParams(use_beam_search=True, n=2, max_tokens=6, length_penalty=0.5, temperature=0.0)
    expected = llm.generate(PROMPTS[0], own, timeout=60).outputs
    for each in found:
        assert [sequence.tokens for sequence in each.sequences] == [ids + one.token_ids for one in expected]
        assert [one.cum_logprob for one in each.sequences] == [one.cumulative_logprob for one in expected]
        assert [one.text for one in each.sequences] == [PROMPTS[0] + one.text for one in expected]
        assert each.completion.outputs[0].score == expected[0].score


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_llm_generates_and_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with LLM(dtype="float32", cpu_threads=1, max_running_requests=4, max_beam_width=2) as llm:
        (run_dir,) = tmp_path.iterdir()
        state = json.loads(Endpoints(run_dir).state_file.read_bytes())
        pids = [state["pid"], *(child["pid"] for child in state["children"])]
        completions = llm.generate(PROMPTS[:6], GREEDY, timeout=60)
        assert len(completions) == 6
        chats = llm.chat(
            [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:2]], GREEDY, timeout=60
        )
        assert len(chats) == 2
        several = SamplingParams(max_tokens=4, temperature=0.0, n=2)
        for alone, completion in zip(
            completions, llm.generate(PROMPTS[:6], several, timeout=60), strict=True
        ):
            assert [each.token_ids for each in completion.outputs] == [alone.token_ids[:4]] * 2
        as_objects = llm.generate([{"prompt": prompt} for prompt in PROMPTS[:6]], GREEDY, timeout=60)
        assert isinstance(as_objects, list)
        assert [(each.prompt, each.text) for each in as_objects] == [
            (prompt, each.text) for prompt, each in zip(PROMPTS, completions, strict=False)
        ]
        tokenizer = llm.get_tokenizer()
        assert tokenizer is llm.get_tokenizer()
        assert tokenizer.decode(completions[0].token_ids) == completions[0].text
        check_beam_search(llm)
        child = os.fork()
        if child == 0:  # a copy of the object in another process must leave the runtime alone
            llm.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert all(map(is_alive, pids))
        assert llm.generate("x", GREEDY, timeout=60).usage.completion_tokens > 0
    assert not [pid for pid in pids if is_alive(pid)]
    assert list(tmp_path.iterdir()) == []
    llm.close()


def test_the_examples_run(launch: Launched) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/sdk_generate.py"), "--run-dir", str(launch.run_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("---") >= 3
