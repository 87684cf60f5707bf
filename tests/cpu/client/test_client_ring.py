"""The client library over its own run directory and over TCP, against a ring with several processes of a
kind: what a request may ask for, from the wire to the model and back.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from carousel import AsyncClient, Client, InvalidRequest, RingClosed, SamplingParams
from runtime.ring.keys import make_keys
from runtime.wire.messages import UNIONS, ControlRequest
from runtime.wire.transport import MessageCodec
from tests.harness.http.web_page import post_of_frames
from tests.harness.ring.launched import SLACK, Launched, free_ports, launched, wait_until

PROMPT = "def function_7("
IDS = [11, 12, 13, 14, 15, 16, 17, 18]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SETTINGS = (
    *("--dtype", "float32", "--cpu-threads", "1", "--max-running-requests", "8", "--no-http"),
    *("--tokenizer-workers", "2", "--detokenizer-workers", "2"),
    *("--gather-context-logits", "--gather-generation-logits"),
)


class Ring:
    """A launch, and how to reach it."""

    def __init__(self, launch: Launched, port: int, curve_dir: Path) -> None:
        self.launch = launch
        self.address = f"tcp://127.0.0.1:{port}"
        self.curve_dir = curve_dir

    def client(self, way: str) -> Client:
        if way == "run_dir":
            return Client(self.launch.run_dir)
        return Client(self.address, curve_dir=self.curve_dir / "client")


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    keys = tmp_path_factory.mktemp("keys")
    make_keys(keys)
    table = keys / "api_keys.toml"
    table.write_text('[client]\nrole = "admin"\n')  # it asks for the server's figures
    table.chmod(0o600)
    port = free_ports(4)
    tcp = ("--zmq-bind", f"tcp://127.0.0.1:{port}", "--curve-dir", str(keys), "--api-keys", str(table))
    with launched(*SETTINGS, *tcp) as launch:
        yield Ring(launch, port, keys)


@pytest.fixture(scope="module", params=["run_dir", "tcp"])
def client(ring: Ring, request: pytest.FixtureRequest) -> Iterator[Client]:
    with ring.client(request.param) as client:
        yield client


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logprobs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


def test_greedy_sequences_of_one_request_are_equal_and_count_the_prompt_once(client: Client) -> None:
    alone = client.generate(PROMPT, GREEDY, timeout=60)
    together = client.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0, n=3), timeout=60)
    assert [each.token_ids for each in together.outputs] == [alone.token_ids] * 3
    assert [each.index for each in together.outputs] == [0, 1, 2]
    assert together.usage.prompt_tokens == alone.usage.prompt_tokens
    assert together.usage.completion_tokens == 3 * len(alone.token_ids)


def test_sampled_sequences_are_those_of_the_next_seeds(client: Client) -> None:
    together = client.generate(PROMPT, SamplingParams(max_tokens=8, seed=5, n=3), timeout=60)
    alone = [client.generate(PROMPT, SamplingParams(max_tokens=8, seed=5 + i), timeout=60) for i in range(3)]
    assert [each.token_ids for each in together.outputs] == [each.token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in together.outputs}) == 3


def test_best_of_gives_the_best_of_all_sequences(client: Client) -> None:
    all_of_them = client.generate(PROMPT, SamplingParams(max_tokens=8, seed=5, n=6, logprobs=0), timeout=60)
    best = client.generate(PROMPT, SamplingParams(max_tokens=8, seed=5, n=2, best_of=6), timeout=60)

    def score(output: object) -> float:
        return -(output.cumulative_logprob or 0.0)  # type: ignore[attr-defined]

    wanted = sorted(all_of_them.outputs, key=score)[:2]
    assert [each.token_ids for each in best.outputs] == [each.token_ids for each in wanted]
    assert [each.index for each in best.outputs] == [0, 1]
    assert best.usage == all_of_them.usage
    for each in all_of_them.outputs:
        total = sum(entry.logprob for entry in each.logprobs)
        assert each.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_the_deltas_of_several_sequences_add_up(client: Client) -> None:
    stream = client.stream(PROMPT, SamplingParams(max_tokens=8, seed=5, n=3), timeout=60)
    texts, ids = [""] * 3, [[], [], []]  # type: ignore[var-annotated]
    for delta in stream:
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
    completion = stream.state.completion()
    assert [each.text for each in completion.outputs] == texts
    assert [each.token_ids for each in completion.outputs] == ids


def test_a_time_limit_ends_a_request_with_what_there_is(client: Client) -> None:
    endless = SamplingParams(max_tokens=1500, ignore_eos=True, n=2)
    for limit_s in (0.2, 1.0, 5.0):
        completion = client.generate(PROMPT, endless, time_limit=limit_s, timeout=60)
        assert {each.finish_reason for each in completion.outputs} == {"timeout"}
        if all(each.token_ids for each in completion.outputs):
            break  # a machine that is held up may have had no time for any
    assert all(0 < len(each.token_ids) < 1500 for each in completion.outputs)


def test_prompt_logprobs_are_those_of_the_context_logits(client: Client) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=2, return_context_logits=True, n=2, temperature=0.0)
    completion = client.generate(IDS, params, timeout=60)
    logits = completion.context_logits
    assert logits is not None
    assert len(logits) == len(IDS) == len(completion.prompt_logprobs)
    wanted = log_softmax(logits)
    first, *rest = completion.prompt_logprobs
    assert first is None
    for position, entry in enumerate(rest):
        assert entry is not None
        assert entry.token_id == IDS[position + 1]
        assert entry.logprob == pytest.approx(wanted[position, entry.token_id], abs=1e-3)
        order = np.argsort(-logits[position], kind="stable")
        assert entry.rank == order.tolist().index(entry.token_id) + 1
        best = np.argsort(-wanted[position], kind="stable")[:2]
        assert [token for token, _ in entry.top] == best.tolist()
    assert completion.token_ids[0] == int(logits[-1].argmax())


def test_prompt_logprobs_stream_in_parts_that_add_up(client: Client) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    stream = client.stream(IDS, params, timeout=60)
    parts = [entry for delta in stream for entry in delta.prompt_logprobs]
    assert parts == stream.state.completion().prompt_logprobs
    assert len(parts) == len(IDS)


def test_generation_logits_explain_the_logprobs(client: Client) -> None:
    params = SamplingParams(max_tokens=6, seed=3, n=2, logprobs=0, return_generation_logits=True)
    for output in client.generate(IDS, params, timeout=60).outputs:
        assert output.generation_logits is not None
        assert len(output.generation_logits) == len(output.token_ids)
        wanted = log_softmax(output.generation_logits)
        for row, entry in zip(wanted, output.logprobs, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-3)


def test_what_the_ring_refuses_fails_the_request_once_and_frees_its_label(client: Client) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            client.generate([1] * 5000, SamplingParams(n=3), label="mine", timeout=60)
        assert caught.value.code == "context_length_exceeded"


def test_leaving_a_request_frees_all_its_rows(client: Client) -> None:
    def num_running() -> int:
        return int(client.server_info()["num_running"])

    stream = client.stream(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True, n=4), timeout=60)
    next(stream)
    wait_until(lambda: num_running() == 4, 5.0, "all four rows run: they may begin in steps of their own")
    stream.close()
    wait_until(lambda: num_running() == 0, 5.0, "the rows are free after leaving")


def test_many_threads_and_lanes_cross_nothing(client: Client) -> None:
    prompts = [[number + 1, 7] for number in range(60)]
    alone = {tuple(prompt): client.generate(prompt, GREEDY, timeout=60).token_ids for prompt in prompts[:6]}
    wrong: list[object] = []

    def call(part: list[list[int]]) -> None:
        for prompt, completion in zip(part, client.generate(part, GREEDY, timeout=60), strict=True):
            wanted = alone.get(tuple(prompt))
            if wanted is not None and completion.token_ids != wanted:
                wrong.append(prompt)

    threads = [threading.Thread(target=call, args=(prompts[start::4] + prompts[:6],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_an_asynchronous_client_over_tcp(ring: Ring) -> None:
    async def main() -> None:
        async with AsyncClient(ring.address, curve_dir=ring.curve_dir / "client") as client:
            params = SamplingParams(max_tokens=4, n=2)
            answers = await asyncio.gather(*(client.generate(PROMPT, params) for _ in range(8)))
            assert {len(answer.outputs) for answer in answers} == {2}

    asyncio.run(asyncio.wait_for(main(), 60))


def post_pauses(port: int) -> None:
    """Send what a web page may, and wait until the connection has ended."""
    pause = MessageCodec(UNIONS["tokenizer_in"], 1).encode(ControlRequest(1, 1, "pause_generation"))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as page, suppress(ConnectionError):
        page.sendall(post_of_frames(pause))
        while page.recv(4096):
            pass


def test_a_ring_with_keys_of_its_own_obeys_no_web_page_and_is_gone_at_once_when_it_is_killed() -> None:
    port = free_ports(4)
    address = f"tcp://127.0.0.1:{port}"
    light = launched("--no-http", "--zmq-bind", address, module="tests.harness.ring.sleeping_worker")
    with light as launch, Client(address, curve_dir=launch.run_dir / "keys" / "client") as client:
        post_pauses(port)
        post_pauses(port + 1)
        stream = client.stream(PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True), timeout=60)
        next(stream)
        began = time.monotonic()
        launch.process.kill()
        with pytest.raises(RingClosed):
            list(stream)
        assert time.monotonic() - began < 5.0 * SLACK
