"""The command as a user has it: against a running server, with a runtime of its own, interrupted, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from carousel.batch.arguments import parse_args
from carousel.batch.lines import URLS
from carousel.batch.main import main
from carousel.server.endpoints import ENDPOINTS
from runtime.base.errors import EXIT_CONFIG, EXIT_NO_MODEL
from tests.harness.ring.launched import ROOT, Launched, launched, wait_until

WAIT_S = 60.0
Line = dict[str, Any]


def completion(number: int, **body: Any) -> Line:
    """A greedy request, every fifth a chat."""
    custom_id = f"request-{number}"
    text = f"def function_{number}(x):\n"
    sampling = {"max_tokens": 4, "temperature": 0, **body}
    url = "/v1/completions"
    prompt: Line = {"prompt": text}
    if number % 5 == 4:
        url, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**prompt, **sampling}}


def write(path: Path, lines: Sequence[Line | str]) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def read(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(body: Line) -> str:
    choice = body["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@contextmanager
def signals_as_they_were() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run(tmp_path: Path, *arguments: str) -> int:
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    with signals_as_they_were():
        return main([*files, *arguments])


def check_answers(url: str, lines: Sequence[Line], outputs: Sequence[Line]) -> None:
    """Every line has the answer that it gets when it is sent alone."""
    found = {output["custom_id"]: output for output in outputs}
    assert len(found) == len(outputs) == len(lines)
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        for line in lines:
            response = found[line["custom_id"]]["response"]
            alone = client.post(line["url"], json=line["body"])
            assert response["status_code"] == alone.status_code
            if alone.status_code == 200:
                assert text_of(response["body"]) == text_of(alone.json())
                assert response["body"]["usage"]["completion_tokens"] == 4


def test_answers_equal_those_of_requests_sent_alone(
    demo_launch: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = demo_launch.wait_ready().url
    lines = [completion(number) for number in range(24)]
    lines[7]["body"]["model"] = "no-such-model"
    write(tmp_path / "in", lines)
    assert run(tmp_path, "--url", f"{url}/v1", "--concurrency", "10") == 1
    outputs = read(tmp_path / "out")
    check_answers(url, lines, outputs)
    (bad,) = (each for each in outputs if each["response"]["status_code"] != 200)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("request-7", 404)
    assert bad["response"]["body"]["error"]["param"] == "model"
    assert all(each["error"] is None and each["response"]["request_id"] for each in outputs)
    assert "24 lines in" in capfd.readouterr().err


def test_every_line_that_cannot_be_sent_has_an_error_and_resume_sends_the_rest(
    demo_launch: Launched, tmp_path: Path
) -> None:
    url = demo_launch.wait_ready().url
    first = completion(0)
    unknown: Line = {**completion(1), "url": "/flush_cache"}
    lines: list[Line | str] = [first, "{", "", first, unknown, "not json", completion(2)]
    write(tmp_path / "in", lines)
    assert run(tmp_path, "--url", url) == 1
    outputs = read(tmp_path / "out")
    codes = {each["error"]["line"]: each["error"]["code"] for each in outputs if each["error"]}
    assert codes == {
        2: "invalid_json_line",
        4: "duplicate_custom_id",
        5: "invalid_url",
        6: "invalid_json_line",
    }
    assert [each["custom_id"] for each in outputs if each["response"]].count("request-0") == 1
    assert len(outputs) == 6

    # A kill after some lines, in whatever order they came, and in the middle of one.
    data = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    for kept in ([], data[:1], data[:3], data[::2], data[1::2], data):
        torn = data[0][:40] if data[0] not in kept else b""
        (tmp_path / "out").write_bytes(b"".join(kept) + torn)
        assert run(tmp_path, "--url", url, "--resume") == 1
        assert (tmp_path / "out").read_bytes().startswith(b"".join(kept))
        again = read(tmp_path / "out")
        assert sorted(map(key_of, again)) == sorted(map(key_of, outputs))


def key_of(output: Line) -> tuple[str, str]:
    what = output["error"] or text_of(output["response"]["body"])
    return str(output["custom_id"]), str(what)


def test_a_runtime_of_its_own_takes_settings_and_ends_with_the_batch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vectors = {
        "custom_id": "vectors",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"input": ["a", "b"]},
    }
    score: Line = {
        **vectors,
        "custom_id": "score",
        "url": "/score",
        "body": {"text_1": "a", "text_2": ["a", "b"]},
    }
    ranks = {"query": "a", "documents": ["a", "b"]}
    rerank: Line = {**vectors, "custom_id": "rerank", "url": "/v1/rerank", "body": ranks}
    requests: list[Line] = [vectors, score, rerank]
    write(tmp_path / "in", requests)
    settings = ("--cpu-threads", "1", "--task=embed", "--served-model-name", "mine")
    assert run(tmp_path, *settings) == 0, capfd.readouterr().err
    outputs = {each["custom_id"]: each["response"]["body"] for each in read(tmp_path / "out")}
    assert len(outputs["vectors"]["data"]) == 2
    assert outputs["score"]["model"] == "mine"
    assert outputs["rerank"]["results"][0]["index"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--port 1", "--port: the batch chooses it"),
        ("--ssl-certfile x", "--ssl-certfile: the batch chooses it"),
        ("--url http://x --model y", "--model: with --url there is no launch"),
        ("--url ftp://x", "--url: 'ftp://x' is not an http or https address"),
        ("--url http://x --header Key", "--header: each must be Name=Value"),
        ("--concurrency 0", "--concurrency: invalid int from 1 on value: '0'"),
        ("--modl y", "unknown option --modl; did you mean --model?"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_sent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: str, says: str
) -> None:
    write(tmp_path / "in", [completion(0)])
    assert run(tmp_path, *arguments.split()) == EXIT_CONFIG
    assert says in capfd.readouterr().err
    assert num_written(tmp_path) == 0


@pytest.mark.parametrize("log", ["text", "json"])
def test_why_its_own_runtime_cannot_start_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], log: str
) -> None:
    write(tmp_path / "in", [completion(0)])
    code = run(tmp_path, "--model", str(tmp_path / "nothing"), "--log-format", log)
    said = capfd.readouterr().err
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert error.startswith(f"error: the runtime could not start: Model directory {tmp_path / 'nothing'} ")
    assert said.count("does not exist") == (1 if log == "text" else 2), "the log in JSON is for a machine"
    assert code == EXIT_NO_MODEL
    assert "Traceback" not in said


def test_lines_may_ask_what_any_user_may_ask_and_gets_as_json() -> None:
    found = {each.path: each for each in ENDPOINTS if each.path in URLS}
    assert {*found} == {*URLS}
    assert all(each.role == "user" and each.methods == ("POST",) for each in found.values())


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    arguments = parse_args(["-i", "~/in", "--output-file=~/out"])
    assert (str(arguments.input_file), str(arguments.output_file)) == (
        "/home/somebody/in",
        "/home/somebody/out",
    )


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    files = ("-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    command = (sys.executable, "-m", "carousel.batch", *files, *arguments)
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


def num_written(tmp_path: Path) -> int:
    path = tmp_path / "out"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_an_interrupt_leaves_what_is_done(demo_launch: Launched, tmp_path: Path, number: int) -> None:
    url = demo_launch.wait_ready().url
    lines = [completion(0), completion(1), *(completion(each, max_tokens=4000) for each in (2, 3))]
    write(tmp_path / "in", lines)
    process = start(tmp_path, "--url", url, "--concurrency", "2")
    wait_until(lambda: num_written(tmp_path) == 2, WAIT_S, "the short ones are written")
    process.send_signal(number)
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, said
    assert b"--resume" in said
    assert b"Traceback" not in said
    assert {each["custom_id"] for each in read(tmp_path / "out")} == {"request-0", "request-1"}


@pytest.mark.full
def test_a_thousand_lines_come_whole_though_the_worker_and_the_batch_are_killed(tmp_path: Path) -> None:
    lines = [completion(number) for number in range(1000)]
    write(tmp_path / "in", lines)
    settings = ("--dtype", "float32", "--cpu-threads", "1", "--served-model-name", "demo")
    with launched(*settings) as launch:
        url = launch.wait_ready().url
        process = start(tmp_path, "--url", url, "--concurrency", "32")
        wait_until(lambda: num_written(tmp_path) > 100, WAIT_S, "a tenth is written")
        os.kill(launch.pid_of("worker"), signal.SIGKILL)
        wait_until(lambda: num_written(tmp_path) > 400, WAIT_S, "it goes on")
        os.kill(launch.pid_of("api"), signal.SIGKILL)
        wait_until(lambda: num_written(tmp_path) > 600, WAIT_S, "it goes on")
        process.kill()
        process.communicate(timeout=WAIT_S)
        process = start(tmp_path, "--url", url, "--concurrency", "32", "--resume")
        _, said = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, said
        outputs = read(tmp_path / "out")
        assert all(each["response"]["status_code"] == 200 for each in outputs)
        check_answers(url, lines, outputs)
