"""The end of a launch: requests finish within their time, new ones are told to come back, nothing hangs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from carousel import Client, SamplingParams
from runtime.base.errors import Overloaded
from tests.harness.ring.launched import Launched, launched, leftovers, wait_until
from tests.harness.ring.sleeping_worker import STEP_S

# Of the worker that sleeps: as long an answer as its steps, on a machine of any speed.
FEW_STEPS = int(4.0 / STEP_S)
MANY_STEPS = 1900
SHORT = {"model": "carousel-demo", "prompt": "x", "max_tokens": 1}


class Caller(threading.Thread):
    """A long streamed answer, read to its end."""

    def __init__(self, url: str, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        self._body = {**SHORT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        self.began = threading.Event()
        self.lines: list[str] = []

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60.0) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
                    self.began.set()
        except httpx.TransportError:
            self.lines.append("cut")


@contextmanager
def streaming(num_tokens: int, *arguments: str) -> Iterator[tuple[Launched, Caller]]:
    """A launch in the middle of an answer."""
    with launched(*arguments, module="tests.harness.ring.sleeping_worker") as launch:
        caller = Caller(launch.url, num_tokens)
        caller.start()
        assert caller.began.wait(60.0)
        yield launch, caller
        caller.join(60.0)


def test_after_a_signal_what_runs_finishes_and_what_is_new_is_refused() -> None:
    with streaming(FEW_STEPS) as (launch, caller):
        url = launch.url
        with Client(launch.run_dir) as client:
            client.server_info(timeout=60.0)  # connected
            launch.process.send_signal(signal.SIGTERM)
            wait_until(lambda: launch.state().get("state") == "draining", 10.0, "the launch drains")
            refused = httpx.post(f"{url}/v1/completions", json=SHORT, timeout=30.0)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert int(refused.headers["Retry-After"]) >= 1
            assert httpx.get(f"{url}/ready").json()["role"] == "launcher"
            with pytest.raises(Overloaded) as error:
                client.generate("x", SamplingParams(max_tokens=1), timeout=30.0)
            assert error.value.code == "shutting_down"
        caller.join(60.0)
        assert "data: [DONE]" in caller.lines
        assert launch.wait_exit(10.0) == 0
        assert not leftovers(launch.run_dir)


@pytest.mark.parametrize("how", ["the time is over", "a second signal"])
def test_what_takes_too_long_is_cut_and_the_exit_code_says_so(how: str) -> None:
    arguments = ["--drain-timeout=1"] if how == "the time is over" else []
    with streaming(MANY_STEPS, *arguments) as (launch, caller):
        launch.process.send_signal(signal.SIGINT)
        if how == "a second signal":
            wait_until(lambda: launch.state().get("state") == "draining", 10.0, "the launch drains")
            launch.process.send_signal(signal.SIGINT)
        assert launch.wait_exit(10.0) == 75, launch.log()
        caller.join(10.0)
        assert "data: [DONE]" not in caller.lines
        assert not leftovers(launch.run_dir)
        assert "Traceback" not in launch.log()


def test_an_idle_launch_does_not_wait() -> None:
    with launched("--drain-timeout=600", module="tests.harness.ring.sleeping_worker") as launch:
        assert launch.stop() == 0
