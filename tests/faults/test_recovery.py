"""kill -9 of every process behind the callers, under load: no request fails, no text differs. A request that
ends the engine itself is found out.
"""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

from carousel import Client, RequestError, SamplingParams
from tests.faults.attacks.poison import POISON_ID
from tests.faults.launch import BEHIND, FaultyLaunch, faulty_launch
from tests.faults.load import REQUEST_TIMEOUT_S, Load, sampling
from tests.harness.ring.launched import SLACK, is_alive, launched, wait_until


def _is_dead(pid: int) -> bool:
    return not is_alive(pid)


def test_no_request_fails_when_any_process_behind_its_caller_is_killed() -> None:
    rng = random.Random(1)
    with faulty_launch() as faulty:
        with Load(faulty.launch.run_dir, faulty.launch.url, num_streams=16, num_http=4, num_plain=4) as load:
            account = load.account
            for role in rng.sample(BEHIND, len(BEHIND)):
                load.wait_for_more()
                pid = faulty.kill(role)
                faulty.wait_replaced(role, pid)
                faulty.wait_ready()
        assert account.failed == []
        assert account.wrong == []
        faulty.check_accounts()


@pytest.mark.full
def test_one_request_goes_on_however_often_the_engine_is_killed_from_outside() -> None:
    length = 1500
    with faulty_launch() as faulty, Client(faulty.launch.run_dir) as client:
        undisturbed = client.generate("Once", sampling(length), timeout=REQUEST_TIMEOUT_S)
        stream = client.stream("Once", sampling(length), timeout=4 * REQUEST_TIMEOUT_S)
        for _ in range(3):
            next(stream)  # it is with this engine
            kill_engine(faulty)
        for _ in stream:
            pass
        completion = stream.state.completion()
        assert (completion.text, completion.usage) == (undisturbed.text, undisturbed.usage)
        faulty.check_accounts()


def kill_engine(faulty: FaultyLaunch) -> None:
    pid = faulty.kill("worker")
    faulty.wait_replaced("worker", pid)
    faulty.wait_ready()


@contextmanager
def launcher_held_up(faulty: FaultyLaunch) -> Iterator[None]:
    """From the moment in which an engine can serve until its worker has died, as on a busy machine."""
    page, stop = faulty.page, threading.Event()

    def hold_up() -> None:
        epoch = page.read("scheduler").epoch
        while not stop.wait(0.001):
            scheduler, worker = page.read("scheduler"), page.read("worker")
            if scheduler.epoch > epoch and scheduler.state == "ready":
                epoch = scheduler.epoch
                faulty.launch.process.send_signal(signal.SIGSTOP)
                with suppress(TimeoutError):
                    wait_until(partial(_is_dead, worker.pid), 2.0, "its death")
                faulty.launch.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.full
@pytest.mark.parametrize("holder", [nullcontext, launcher_held_up])
def test_a_request_that_ends_the_engine_is_quarantined_and_no_other(
    holder: Callable[[FaultyLaunch], AbstractContextManager[None]],
) -> None:
    backend = "--attention-backend=tests.faults.attacks.poison:PoisonedAttention"
    lengths = [200, 400, 600, 800]
    with (
        faulty_launch(backend) as faulty,
        Client(faulty.launch.run_dir) as client,
        ThreadPoolExecutor(len(lengths) + 1) as pool,
    ):
        undisturbed = [client.generate("A letter", sampling(each)).text for each in lengths]

        def ask(length: int) -> str:
            return client.generate("A letter", sampling(length), timeout=4 * REQUEST_TIMEOUT_S).text

        def ask_poison() -> RequestError:
            poison = SamplingParams(max_tokens=4)
            with pytest.raises(RequestError) as error:
                client.generate([1, POISON_ID], poison, timeout=4 * REQUEST_TIMEOUT_S)
            return error.value

        with holder(faulty):
            others = [pool.submit(ask, each) for each in lengths]
            error = pool.submit(ask_poison).result()
        assert (error.code, error.status) == ("quarantined", 400)
        assert [other.result() for other in others] == undisturbed
        assert len(faulty.events("restart")) == 3
        faulty.check_accounts()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_tenant_that_ends_the_engine_again_and_again_is_suspended(tmp_path: Path) -> None:
    """Each time it hangs up and asks anew, so that nobody is seen twice. Six deaths would end the launch."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[victim]\nkey = "victim"\n[attacker]\nkey = "attacker"\n')
    keys.chmod(0o600)
    with launched(
        "--restart=auto",
        "--restart-window=3600",
        "--attention-backend=tests.faults.attacks.poison:PoisonedAttention",
        f"--api-keys={keys}",
    ) as launch:

        def ask(key: str, prompt: list[int], length: int, timeout_s: float) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
            headers = {"Authorization": f"Bearer {key}"}
            url = f"{launch.url}/v1/completions"
            return httpx.post(url, json=body, headers=headers, timeout=timeout_s)

        def answers(number: int) -> int:
            return ask("victim", [1, 7, number], 400, 4 * REQUEST_TIMEOUT_S).status_code

        with ThreadPoolExecutor(4) as pool:
            victims = [pool.submit(answers, number) for number in range(7, 11)]
            deadline = time.monotonic() + SLACK * REQUEST_TIMEOUT_S
            status = 0
            while status != 429 and time.monotonic() < deadline:
                with suppress(httpx.TimeoutException):
                    response = ask("attacker", [1, POISON_ID], 4, 0.5)
                    status = response.status_code
            assert (status, response.json()["error"]["code"]) == (429, "key_suspended")
            assert [each.result() for each in victims] == [200] * 4
        events = map(json.loads, (launch.run_dir / "events.jsonl").read_text().splitlines())
        assert sum(event["event"] == "restart" for event in events) <= 5


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_callers_who_hang_up_and_send_another_request_that_ends_the_engine_end_no_launch() -> None:
    """Two of them, without keys, for more deaths than the budget of a launch has restarts."""
    num_deaths = 8
    backend = "--attention-backend=tests.faults.attacks.poison:PoisonedAttention"
    with faulty_launch(backend, "--restart-window=3600") as faulty, ThreadPoolExecutor(4) as pool:
        stop = threading.Event()

        def ask(prompt: list[int], length: int, timeout_s: float) -> int:
            body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
            return httpx.post(f"{faulty.launch.url}/v1/completions", json=body, timeout=timeout_s).status_code

        def attack(number: int) -> None:
            while not stop.is_set():
                with suppress(httpx.TimeoutException):
                    ask([1, number, POISON_ID], 4, 0.5)

        victims = [pool.submit(ask, [1, 7, number], 400, 12 * REQUEST_TIMEOUT_S) for number in (7, 8)]
        attackers = [pool.submit(attack, number) for number in (7, 8)]
        wait_until(
            lambda: len(faulty.events("restart")) >= num_deaths, SLACK * 12 * REQUEST_TIMEOUT_S, "many deaths"
        )
        stop.set()
        for attacker in attackers:
            attacker.result()
        assert [victim.result() for victim in victims] == [200, 200]
        assert faulty.events("budget_spent") == []
