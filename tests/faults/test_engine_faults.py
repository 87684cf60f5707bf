"""An engine that dies under 64 requests: of signals from outside, which nobody is blamed for; of one of them,
which is found out.
"""

from __future__ import annotations

import itertools
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from carousel import Client, RequestError, SamplingParams
from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.roster import NO_SUSPECTS, Suspects
from tests.faults.attacks.poison import POISON_ID
from tests.faults.launch import SETTLE_S, FaultyLaunch, faulty_launch
from tests.faults.load import PROMPTS, REQUEST_TIMEOUT_S, Load, sampling
from tests.harness.ring.launched import wait_until

SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGKILL)
NUM_SIGNALS = 10
NUM_REQUESTS = 64
LENGTHS = (20, 60, 150)


def suspects(faulty: FaultyLaunch) -> Suspects:
    return Suspects.read(Endpoints(faulty.launch.run_dir).suspects_file)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_64_requests_go_on_whatever_signals_the_worker_is_sent() -> None:
    with faulty_launch(f"--max-running-requests={NUM_REQUESTS}") as faulty:

        def all_run() -> bool:
            """One or two may have ended this moment and been asked again."""
            return faulty.page.read("scheduler").num_running >= NUM_REQUESTS - 2

        run_dir, url = faulty.launch.run_dir, faulty.launch.url
        with Load(run_dir, url, num_streams=48, num_http=12, num_plain=4) as load:
            for number in itertools.islice(itertools.cycle(SIGNALS), NUM_SIGNALS):
                wait_until(all_run, SETTLE_S, "all requests run")
                pid = faulty.kill("worker", number)
                faulty.wait_replaced("worker", pid)
                faulty.wait_ready()
        assert load.account.failed == []
        assert load.account.wrong == []
        assert load.account.num_done >= NUM_REQUESTS
        restarts = faulty.events("restart")
        assert [event["unit"] for event in restarts] == ["engine"] * NUM_SIGNALS
        assert suspects(faulty) == NO_SUSPECTS, "somebody is blamed"
        faulty.check_accounts()


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_of_64_that_ends_the_worker_is_ended_alone(seed: int) -> None:
    """Wherever it comes among them. After two deaths all that were there run alone, one after another."""
    backend = "--attention-backend=tests.faults.attacks.poison:PoisonedAttention"
    timeout = 8 * REQUEST_TIMEOUT_S
    others = list(itertools.islice(itertools.cycle(itertools.product(PROMPTS, LENGTHS)), NUM_REQUESTS - 1))
    with (
        faulty_launch(backend, f"--max-running-requests={NUM_REQUESTS}") as faulty,
        Client(faulty.launch.run_dir) as client,
        ThreadPoolExecutor(NUM_REQUESTS) as pool,
    ):

        def ask(prompt: str, length: int) -> str:
            return client.generate(prompt, sampling(length), timeout=timeout).text

        def ask_poison() -> RequestError:
            with pytest.raises(RequestError) as error:
                client.generate([1, POISON_ID], SamplingParams(max_tokens=4), timeout=timeout)
            return error.value

        undisturbed = {key: ask(*key) for key in set(others)}
        at = random.Random(seed).randrange(len(others))
        before = [pool.submit(ask, *key) for key in others[:at]]
        poison = pool.submit(ask_poison)
        behind = [pool.submit(ask, *key) for key in others[at:]]
        error = poison.result()
        assert (error.code, error.status) == ("quarantined", 400)
        assert [each.result() for each in (*before, *behind)] == [undisturbed[key] for key in others]
        assert len(faulty.events("restart")) <= 3
        assert len(suspects(faulty).guilty) == 1
        faulty.check_accounts()
