"""A request that ends the tokenizer is found out like one that ends the engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from carousel import Client, RequestError, SamplingParams
from tests.faults.attacks.fragile.sitecustomize import POISON
from tests.faults.launch import FaultyLaunch
from tests.faults.load import REQUEST_TIMEOUT_S, sampling
from tests.harness.ring.launched import launched

FOLDER = Path(__file__).parent / "fragile"


@pytest.mark.full
@pytest.mark.parametrize("filler", ["", "x " * 40_000], ids=["short", "long"])
def test_a_text_that_ends_the_tokenizer_is_refused_and_no_other(
    monkeypatch: pytest.MonkeyPatch, filler: str
) -> None:
    """Also one that is so long that a thread encodes it, while others are encoded."""
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    with (
        launched("--restart=auto", "--dtype=float32", is_cold=True) as launch,
        closing(FaultyLaunch(launch)) as faulty,
        Client(faulty.launch.run_dir) as client,
        ThreadPoolExecutor(9) as pool,
    ):

        def ask_poison() -> RequestError:
            with pytest.raises(RequestError) as error:
                client.generate(filler + POISON, SamplingParams(max_tokens=4), timeout=REQUEST_TIMEOUT_S)
            return error.value

        def ask(text: str) -> str:
            return client.generate(text, sampling(8), timeout=REQUEST_TIMEOUT_S).text

        texts = [f"A letter {number}" for number in range(8)]
        undisturbed = [ask(text) for text in texts]
        refused = pool.submit(ask_poison)
        others = [pool.submit(ask, text) for text in texts]
        assert (refused.result().code, refused.result().status) == ("quarantined", 400)
        assert [other.result() for other in others] == undisturbed
        assert len(faulty.events("restart")) == 3
        faulty.check_accounts()
