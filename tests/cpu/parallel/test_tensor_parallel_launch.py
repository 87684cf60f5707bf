"""A launch with tensor-parallel ranks as a user meets it: the tokens of one, and an end when one dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from carousel import Client, GenerationExecutor, GenerationRequest, SamplingParams
from tests.harness.nodes import SMALL_POOL
from tests.harness.ring.beam_draws import assert_same, found_of, plain_draw, searched
from tests.harness.ring.launched import ROOT, Launched, is_alive, launched, leftovers, wait_until

NUM_MIXED = 100
NUM_FOUR = 10
POOL = SMALL_POOL
BEAMS = ("--max-beam-width", "4")
TIMEOUT_S = 240.0


def mixed_requests() -> tuple[list[str], list[SamplingParams]]:
    """Greedy and seeded, short and long, with and without shared beginnings."""
    rng = random.Random(5)
    words = ["def", "class", "import", "return", "self", "value", "for", "in", "range", "(x):", "name", "="]
    prompts, sampling = [], []
    for n in range(NUM_MIXED):
        beginning = "import os\nimport sys\n\n" if n % 3 == 0 else ""
        prompts.append(beginning + " ".join(rng.choices(words, k=rng.randrange(2, 30))))
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5},
        ]
        sampling.append(
            SamplingParams(
                max_tokens=rng.randrange(1, 24), ignore_eos=n % 2 == 0, seed=900 + n, **kinds[n % 3]
            )
        )
    return prompts, sampling


@pytest.fixture(scope="module")
def expected(demo_launch: Launched) -> list[list[int]]:
    """From one rank."""
    with Client(demo_launch.run_dir) as client:
        return tokens_of(client, NUM_MIXED)


def tokens_of(client: Client, num_requests: int) -> list[list[int]]:
    prompts, sampling = mixed_requests()
    done = client.generate(prompts[:num_requests], sampling[:num_requests], timeout=TIMEOUT_S)
    return [list(completion.token_ids) for completion in done]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Launched]:
    with launched("--tp-size", "2", *POOL, *BEAMS) as launch:
        yield launch


def test_a_hundred_mixed_requests_have_the_tokens_of_one_rank(
    expected: list[list[int]], two_ranks: Launched
) -> None:
    """All at once, under overlap, in a pool that takes rows back, beside requests that are given up."""
    with Client(two_ranks.run_dir) as client:
        given_up = [
            client.stream("def f(x):\n", SamplingParams(max_tokens=200, ignore_eos=True, seed=n))
            for n in range(3)
        ]
        for stream in given_up:
            next(stream)
            client.abort(stream)
        assert tokens_of(client, NUM_MIXED) == expected
        assert all(list(stream)[-1].finish_reason == "abort" for stream in given_up)
        assert client.server_info()["num_retracted"] > 0, "the small pool forced nobody to give way"


def test_a_beam_search_over_two_ranks_finds_what_transformers_finds(two_ranks: Launched) -> None:
    model = AutoModelForCausalLM.from_pretrained(ROOT / "carousel" / "demo_model", dtype=torch.float32)
    draw = plain_draw(list(range(100, 148)), 24)
    with Client(two_ranks.run_dir) as client:
        completion = client.generate(draw.prompt, draw.sampling, timeout=TIMEOUT_S)
    wanted = searched(model, draw, [model.generation_config.eos_token_id])
    assert_same(found_of(completion.outputs), wanted, draw)
    ruled = draw._replace(repetition=1.3, ngram=2, bias=((draw.prompt[0], 2.0),))
    with Client(two_ranks.run_dir) as client:
        found = found_of(client.generate(ruled.prompt, ruled.sampling, timeout=TIMEOUT_S).outputs)
    assert_same(found, searched(model, ruled, [model.generation_config.eos_token_id]), ruled)
    with GenerationExecutor.create(run_dir=two_ranks.run_dir) as executor:
        request_id = executor.enqueue_request(GenerationRequest(draw.prompt, draw.sampling))
        (response,) = executor.await_responses(request_id, timeout=TIMEOUT_S)
    assert response.is_final
    assert response.result.output_token_ids == [each.tokens for each in wanted]
    sums = [output.cumulative_logprob for output in completion.outputs]
    assert response.result.cum_log_probs == sums


def test_a_flush_is_one_of_all_ranks(two_ranks: Launched) -> None:
    """Nothing of a prompt is taken from the cache after it."""
    asked = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with Client(two_ranks.run_dir) as client:
        done = [client.generate(list(range(200, 240)), asked, timeout=TIMEOUT_S) for _ in range(2)]
        client.flush_cache()
        done.append(client.generate(list(range(200, 240)), asked, timeout=TIMEOUT_S))
    assert [each.usage.cached_tokens > 0 for each in done] == [False, True, False]
    assert done[0].token_ids == done[1].token_ids == done[2].token_ids


def test_each_rank_is_a_process_that_state_json_names(two_ranks: Launched) -> None:
    pids = {two_ranks.pid_of("worker", rank) for rank in range(2)}
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.full)])
def test_four_ranks_have_the_tokens_of_one(expected: list[list[int]], tp_size: int, pp_size: int) -> None:
    """Two in each of two stages, and four in one. Each is a process."""
    layout = ("--tp-size", str(tp_size), "--pp-size", str(pp_size))
    with launched(*layout, *POOL) as launch, Client(launch.run_dir) as client:
        assert tokens_of(client, NUM_FOUR) == expected[:NUM_FOUR]
        workers = [child["pid"] for child in launch.state()["children"] if child["role"] == "worker"]
        assert len(set(workers)) == 4


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_the_death_of_a_rank_ends_the_launch_with_an_error(rank: int) -> None:
    """While it computes: the other rank is in the middle of a step and waits for it."""
    with launched("--tp-size", "2", "--restart", "never", *POOL) as launch:
        pids = launch.pids()
        with Client(launch.run_dir) as client:
            stream = client.stream("def f(x):\n", SamplingParams(max_tokens=200, ignore_eos=True))
            next(stream)
            killed_at = time.monotonic()
            os.kill(launch.pid_of("worker", rank), signal.SIGKILL)
            assert launch.wait_exit(10.0) == 70
            print(f"the launch ended {time.monotonic() - killed_at:.3f} s after rank {rank}")
        # Launcher and scheduler see it at the same time; either is right.
        last_line = launch.log().strip().splitlines()[-1]
        assert f"worker:{rank}" in last_line or f"rank {rank} " in last_line
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 5.0, "all processes end")
        assert not leftovers(launch.run_dir)


@pytest.mark.full
def test_a_killed_follower_is_started_again_with_its_group(tmp_path: Path) -> None:
    """The ranks of the next epoch meet anew, whatever the ones before have left in the run directory."""
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with launched("--tp-size", "2", "--restart", "auto", *POOL) as launch:
        with Client(launch.run_dir) as client:
            before = client.generate("def f(x):\n", sampling, timeout=TIMEOUT_S)
        old = launch.pid_of("worker", 1)
        os.kill(old, signal.SIGKILL)

        def is_ready_again() -> bool:
            children = launch.state()["children"]
            engine = [child for child in children if child["role"] in ("worker", "scheduler")]
            return len(engine) == 3 and all(
                child["pid"] != old and child["ready"] and child["epoch"] == 2 for child in engine
            )

        wait_until(is_ready_again, 90.0, "the engine is ready again")
        with Client(launch.run_dir) as client:
            after = client.generate("def f(x):\n", sampling, timeout=TIMEOUT_S)
    assert list(after.token_ids) == list(before.token_ids)
