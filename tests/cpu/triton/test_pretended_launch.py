"""The whole server with a pretended GPU: the worker in the scheduler's process, over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.triton.adapters.test_triton_lora import save_model_and_adapters
from tests.harness.models.plans import save_tiny_llama
from tests.harness.pretended_gpu.launch import NUM_BYTES
from tests.harness.ring.launched import SLACK, Launched, launched

TIMEOUT_S = 30.0 * SLACK
OF_ANY_DEVICE = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--max-running-requests", "2"),
    *("--context-length", "64", "--max-total-tokens", "256", "--served-model-name", "tiny"),
    *("--chunked-prefill-size", "16"),
)
SETTINGS = (*OF_ANY_DEVICE, "--cuda-graph-bs", "2")


def body(last: int, max_tokens: int = 3, **options: Any) -> dict[str, Any]:
    prompt = {"prompt": [1, 5, 9, last], "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return {"model": "tiny", **prompt, **options}


def token_ids(launch: Launched, last: int) -> list[int]:
    response = httpx.post(f"{launch.url}/v1/completions", json=body(last), timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def abandon(launch: Launched) -> None:
    """Read the first token of a long answer and go away."""
    request = body(2, 50, stream=True)
    url = f"{launch.url}/v1/completions"
    with httpx.stream("POST", url, json=request, timeout=TIMEOUT_S) as response:
        first = next(line for line in response.iter_lines() if line)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["token_ids"]


def test_it_serves_is_killed_and_serves_on(tmp_path: Path) -> None:
    """At the end of the process nothing is left that a GPU would have punished, or it would not end well."""
    save_tiny_llama(tmp_path)
    arguments = ("--model", str(tmp_path), *SETTINGS)
    with (
        launched(*arguments, module="tests.harness.pretended_gpu.launch") as launch,
        ThreadPoolExecutor(3) as pool,
    ):
        answers = list(pool.map(lambda last: token_ids(launch, last), (3, 4, 3)))
        assert answers[0] == answers[2] != answers[1]
        abandon(launch)
        over_the_death = pool.submit(token_ids, launch, 3)
        os.kill(launch.pid_of("scheduler"), signal.SIGKILL)
        assert over_the_death.result() == answers[0]
        assert launch.stop() == 0, launch.log()
        assert "restarting" in launch.log()
        assert "Error" not in launch.log()


@pytest.mark.full
def test_a_step_for_which_memory_ends_ends_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has taken what the long prompt's step was measured to need: the engine dies of it,
    twice and once more of it alone. The log says what to turn.
    """
    save_tiny_llama(tmp_path)
    monkeypatch.setenv(NUM_BYTES, "1000000,60000")
    arguments = (
        "--model",
        str(tmp_path),
        *SETTINGS,
        "--chunked-prefill-size",
        "64",
        "--max-total-tokens",
        "0",
    )

    def ask(launch: Launched, prompt: list[int]) -> httpx.Response:
        url, request = f"{launch.url}/v1/completions", {**body(3), "prompt": prompt}
        return httpx.post(url, json=request, timeout=TIMEOUT_S)

    with (
        launched(*arguments, module="tests.harness.pretended_gpu.launch") as launch,
        ThreadPoolExecutor(4) as pool,
    ):
        too_long = pool.submit(ask, launch, [3] * 60)
        others = [pool.submit(ask, launch, [last] * 4) for last in (5, 6, 7)]
        assert too_long.result().json()["error"]["code"] == "quarantined"
        assert [each.result().status_code for each in others] == [200, 200, 200]
        assert ask(launch, [9] * 4).status_code == 200
        assert launch.stop() == 0, launch.log()
        assert re.search(r"out of memory: lower --mem-fraction-static.*restarting engine", launch.log())
        assert "Traceback" not in launch.log()


@pytest.mark.full
def test_it_serves_adapters_by_name(tmp_path: Path) -> None:
    """Rows of two adapters and of the model alone, together, have the tokens that a CPU gives them."""
    model, *adapters = save_model_and_adapters(tmp_path)
    modules = ",".join(f"{path.name}={path}" for path in adapters)
    adapted = ("--model", str(model), "--lora-modules", modules, "--max-lora-rank", "8")
    names = ["tiny", *(path.name for path in adapters)]

    def ask(launch: Launched, name: str) -> list[int]:
        request = {**body(3), "model": name}
        response = httpx.post(f"{launch.url}/v1/completions", json=request, timeout=TIMEOUT_S)
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    with launched(*adapted, *OF_ANY_DEVICE, "--device", "cpu") as launch:
        expected = [ask(launch, name) for name in names]
    assert len({tuple(ids) for ids in expected}) == 3
    with (
        launched(*adapted, *SETTINGS, module="tests.harness.pretended_gpu.launch") as launch,
        ThreadPoolExecutor(3) as pool,
    ):
        assert [ask(launch, name) for name in names] == expected
        assert list(pool.map(lambda name: ask(launch, name), names)) == expected
        assert launch.stop() == 0, launch.log()
        assert "Error" not in launch.log()
