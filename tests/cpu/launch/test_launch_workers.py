"""Several processes of a kind: as many as asked for, all of them serve, and none is left behind."""

from __future__ import annotations

import collections
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from carousel import Client, SamplingParams
from runtime.ring.endpoints import Endpoints
from runtime.wire.status_page import StatusPage
from tests.harness.ring.launched import SLACK, Launched, is_alive, launched, leftovers, wait_until

SHORT = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
WORKERS = ("--tokenizer-workers", "2", "--detokenizer-workers", "3")
PROMPTS = ["def f(", "import ", "# the", "x = [", "class A", "return"]


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    with launched(*WORKERS, "--api-workers", "2", "--dtype", "float32") as launch:
        yield launch


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()


def test_there_are_as_many_processes_as_the_flags_say_and_each_has_its_name(launch: Launched) -> None:
    children = launch.state()["children"]
    counts = collections.Counter(child["role"] for child in children)
    assert counts == {"worker": 1, "scheduler": 1, "grammar": 1, "tokenizer": 2, "detokenizer": 3, "api": 2}
    assert all(child["ready"] for child in children)
    assert {title(child["pid"]) for child in children} == {
        "carousel:worker",
        "carousel:scheduler",
        "carousel:grammar",
        *(f"carousel:tokenizer:{index}" for index in range(2)),
        *(f"carousel:detokenizer:{index}" for index in range(3)),
        *(f"carousel:api:{index}" for index in range(2)),
    }


def test_the_status_page_shows_each_of_them(launch: Launched) -> None:
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    for child in launch.state()["children"]:
        status = page.read(child["role"], child["index"])
        assert (status.pid, status.state) == (child["pid"], "ready")
        assert status.age_s() < 3.0 * SLACK
    page.close()


def test_every_lane_gives_the_same_answers(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        first = {prompt: client.generate(prompt, SHORT, timeout=60).text for prompt in PROMPTS}
        for _ in range(6):  # the prompts go over other lanes each time
            outputs = client.generate(PROMPTS[1:], SHORT, timeout=60)
            assert [output.text for output in outputs] == [first[prompt] for prompt in PROMPTS[1:]]


def test_an_abort_reaches_the_http_process_that_has_the_request(launch: Launched) -> None:
    """Which of them takes a connection is the kernel's to say."""
    body = {"text": "def f(", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(httpx.post, f"{launch.url}/generate", json=body, timeout=60) for _ in range(6)]
        while not all(answer.done() for answer in answers):
            aborted = httpx.post(f"{launch.url}/abort_request", json={"abort_all": True}, timeout=60)
            assert aborted.status_code == 200
            time.sleep(0.01)
    reasons = [answer.result().json()["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert reasons == ["abort"] * 6


def test_both_tokenizers_take_their_share(launch: Launched) -> None:
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    before = [page.read("tokenizer", index).num_sent for index in range(2)]
    with Client(launch.run_dir) as client:
        client.generate(["x"] * 40, SHORT, timeout=60)
    wait_until(
        lambda: sum(page.read("tokenizer", index).num_sent for index in range(2)) == sum(before) + 40,
        5.0,
        "the tokenizers have said what they sent",
    )
    taken = [page.read("tokenizer", index).num_sent - before[index] for index in range(2)]
    assert taken == [20, 20]
    page.close()


def test_the_number_of_processes_changes_no_answer(launch: Launched, demo_launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        of_many = [output.text for output in client.generate(PROMPTS, SHORT, timeout=60)]
    with Client(demo_launch.run_dir) as client:
        assert [output.text for output in client.generate(PROMPTS, SHORT, timeout=60)] == of_many


def test_the_detokenizers_have_equal_shares_of_a_clients_sequences(launch: Launched) -> None:
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    with Client(launch.run_dir) as client:
        streams = [client.stream("x", LONG) for _ in range(30)]
        wait_until(
            lambda: [page.read("detokenizer", index).num_running for index in range(3)] == [10, 10, 10],
            10.0,
            "each has ten of them",
        )
        for stream in streams:
            stream.close()
    page.close()


def test_a_salt_means_the_same_to_every_tokenizer(launch: Launched) -> None:
    prompt = "a prompt that is longer than a page, so that some of it can be shared " * 2
    with Client(launch.run_dir) as client:
        cached = [
            client.generate(prompt, SHORT, cache_salt=salt, timeout=60).usage.cached_tokens
            for salt in ("mine", "mine", "yours", "yours")
        ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_an_abort_follows_its_request_through_the_same_tokenizer(launch: Launched) -> None:
    page = StatusPage(Endpoints(launch.run_dir).status_file)
    with Client(launch.run_dir) as client:
        for _ in range(8):
            stream = client.stream("x", LONG)
            next(iter(stream))
            stream.close()
    wait_until(lambda: page.read("scheduler").num_running == 0, 10.0, "all were aborted")
    page.close()


def test_http_is_served_by_every_api_process(launch: Launched) -> None:
    body = {"model": "carousel-demo", "prompt": "def f(", "max_tokens": 4, "temperature": 0}

    def complete() -> str:
        reply = httpx.post(f"{launch.url}/v1/completions", json=body, timeout=30.0)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    text = complete()
    for index in range(2):
        # Who is left answers all: a new connection is never given to a process that does not take it.
        stopped = launch.pid_of("api", index)
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert {complete() for _ in range(8)} == {text}
        finally:
            # On a busy machine eight answers may take until it is given up, killed and replaced.
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        wait_until(
            lambda: sum(child["ready"] for child in launch.state()["children"]) == 10, 10.0, "all serve"
        )
    assert httpx.get(f"{launch.url}/ready", timeout=10.0).status_code == 200


def test_ctrl_c_ends_all_of_them_at_once() -> None:
    light = (*WORKERS, "--api-workers", "4", "--skip-tokenizer-init")
    with launched(*light, module="tests.harness.ring.sleeping_worker") as launch:
        pids = launch.pids()
        assert len(pids) == 1 + 1 + 1 + 2 + 3 + 4
        began = time.monotonic()
        assert launch.stop() == 0
        assert time.monotonic() - began <= 2.0 * SLACK
        assert not [pid for pid in pids if is_alive(pid)]
        assert not leftovers(launch.run_dir)
        assert "Traceback" not in launch.log()
