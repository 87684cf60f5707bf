"""A request that ends a tokenizer, a detokenizer or the grammar process is found out like one that ends the
engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from carousel import Client, RequestError, SamplingParams
from carousel.structured_outputs import StructuredOutputsParams
from tests.faults.attacks.fragile.sitecustomize import POISON
from tests.faults.launch import FaultyLaunch
from tests.faults.load import REQUEST_TIMEOUT_S
from tests.harness.ring.launched import launched

FOLDER = Path(__file__).parent / "fragile"


@pytest.fixture(scope="module")
def fragile() -> Iterator[FaultyLaunch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", str(FOLDER))
        with (
            launched("--restart=auto", "--dtype=float32", is_cold=True) as launch,
            closing(FaultyLaunch(launch)) as faulty,
        ):
            yield faulty


@pytest.mark.full
@pytest.mark.parametrize(
    ("poison", "stop", "options"),
    [
        (POISON, (), {}),
        ("x " * 40_000 + POISON, (), {}),
        ("Once", (), {"structured_outputs": StructuredOutputsParams(regex=f"({POISON})+")}),
        ("Once", (POISON,), {}),
    ],
    ids=["short", "long", "guide", "stop"],
)
def test_a_request_that_ends_a_process_outside_the_engine_is_refused_and_no_other(
    fragile: FaultyLaunch, poison: str, stop: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Also a text that is so long that a thread encodes it, while others are encoded, and one that ends the
    detokenizer at its third token.
    """
    num_restarts = len(fragile.events("restart"))
    with Client(fragile.launch.run_dir) as client, ThreadPoolExecutor(9) as pool:

        def ask_poison() -> RequestError:
            few = SamplingParams(max_tokens=4, ignore_eos=True, stop=stop)
            with pytest.raises(RequestError) as error:
                client.generate(poison, few, timeout=REQUEST_TIMEOUT_S, **options)
            return error.value

        def ask(number: int) -> str:
            guide = StructuredOutputsParams(regex="[a-z]{20}") if number % 2 else None
            text, params = f"A letter {number}", SamplingParams(max_tokens=8, seed=number)
            completion = client.generate(text, params, timeout=REQUEST_TIMEOUT_S, structured_outputs=guide)
            return completion.text

        undisturbed = list(map(ask, range(8)))
        refused = pool.submit(ask_poison)
        others = [pool.submit(ask, number) for number in range(8)]
        assert (refused.result().code, refused.result().status) == ("quarantined", 400)
        assert [other.result() for other in others] == undisturbed
        assert len(fragile.events("restart")) - num_restarts == 3
        fragile.check_accounts()
