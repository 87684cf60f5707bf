"""A launch with pipeline stages as a user meets it, on two nodes and on one machine: the bits of one stage,
and streams that outlive one.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

from carousel import Client, SamplingParams
from carousel import StructuredOutputsParams as Guide
from tests.cpu.parallel.test_nodes_launch import streams_of
from tests.cpu.parallel.test_tensor_parallel_launch import NUM_MIXED, TIMEOUT_S, tokens_of
from tests.harness.models.native import needs_compiler
from tests.harness.nodes import SMALL_POOL, Nodes, nodes
from tests.harness.ring.launched import Launched, is_alive, launched, leftovers, wait_until

LOGITS = ("--gather-context-logits", "--gather-generation-logits")
NUM_STREAMS = 8
NUM_ON_NODES = 40
NUM_TOKENS = 120
STOPPED_S = 5.0
"""Silence after which a stage is given up, at most."""

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def two_stages() -> Iterator[Launched]:
    with launched("--pp", "2", *SMALL_POOL, *LOGITS) as launch:
        yield launch


@pytest.fixture(scope="module")
def expected(demo_launch: Launched) -> list[list[int]]:
    """From one stage."""
    with Client(demo_launch.run_dir) as client:
        return tokens_of(client, NUM_MIXED)


def logits_of(launch: Launched | Nodes) -> list[Any]:
    """Raw logits of prompts and outputs, some beside each other, in chunks, and from the cache."""
    prompts = ["import os\n" * n + f"def f{n}(x):\n    return" for n in (1, 6, 12)]
    asked = SamplingParams(
        max_tokens=12, temperature=0.8, seed=3, ignore_eos=True,
        return_context_logits=True, return_generation_logits=True, logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    with Client(launch.run_dir) as client:
        done = client.generate(prompts, [asked] * len(prompts), timeout=TIMEOUT_S)
        done += client.generate(prompts[:1], [asked], timeout=TIMEOUT_S)
    return [
        (list(each.token_ids), np.asarray(each.context_logits), np.asarray(each.outputs[0].generation_logits))
        for each in done
    ]


@pytest.mark.parametrize(
    ("num_stages", "fixture"),
    [
        (2, "two_nodes"),
        pytest.param(2, "two_stages", marks=pytest.mark.full),
        pytest.param(4, "", marks=pytest.mark.full),
    ],
)
def test_raw_logits_are_the_bits_of_one_stage(
    num_stages: int, fixture: str, demo_launch: Launched, request: pytest.FixtureRequest
) -> None:
    """Each process records its layers, as the one of a single stage does."""
    expected = logits_of(demo_launch)
    if fixture:
        made = logits_of(request.getfixturevalue(fixture))
    else:
        with launched("--pp", str(num_stages), *SMALL_POOL, *LOGITS) as launch:
            made = logits_of(launch)
    for (tokens, *logits), (other_tokens, *other_logits) in zip(expected, made, strict=True):
        assert tokens == other_tokens
        for one, other in zip(logits, other_logits, strict=True):
            assert one.size > 0
            assert one.shape == other.shape
            assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize(
    ("num_stages", "fixture"), [(2, "two_nodes"), pytest.param(2, "two_stages", marks=pytest.mark.full)]
)
def test_a_hundred_mixed_requests_have_the_tokens_of_one_stage(
    num_stages: int, fixture: str, expected: list[list[int]], request: pytest.FixtureRequest
) -> None:
    """In a pool that takes rows back, beside requests that are given up and several sequences of one."""
    with Client(request.getfixturevalue(fixture).run_dir) as client:
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
        assert client.server_info()["max_steps_in_flight"] == num_stages + 1


@pytest.mark.parametrize("fixture", ["two_nodes", pytest.param("two_stages", marks=pytest.mark.full)])
def test_a_guide_and_several_sequences(
    fixture: str, demo_launch: Launched, request: pytest.FixtureRequest
) -> None:
    """Masks lie in memory where the stage that samples is on the scheduler's machine, else they are sent."""
    asked, guide = SamplingParams(max_tokens=24, temperature=1.0, seed=5), Guide(regex="[a-f]{3,9}")
    texts = []
    for launch in (demo_launch, request.getfixturevalue(fixture)):
        with Client(launch.run_dir) as client:
            guided = client.generate("x = ", asked, structured_outputs=guide, timeout=TIMEOUT_S)
            several = client.generate("y = ", msgspec.structs.replace(asked, n=3), timeout=TIMEOUT_S)
            texts.append([output.text for each in (guided, several) for output in each.outputs])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 4


@pytest.mark.parametrize(
    ("victim", "number"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)],
)
@pytest.mark.full
def test_streams_outlive_a_stage_that_is_killed_or_stopped(
    two_stages: Launched, victim: int, number: signal.Signals
) -> None:
    """At a random moment; the engine starts again as one, and no client sees more than a pause."""
    sampling = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=n, logprobs=1) for n in range(NUM_STREAMS)
    ]
    prompts = [f"def f{n}(x):\n" for n in range(NUM_STREAMS)]
    with Client(two_stages.run_dir) as client:
        expected = client.generate(prompts, sampling, timeout=TIMEOUT_S)
        streams = [client.stream(*each) for each in zip(prompts, sampling, strict=True)]
        told = [[next(stream)] for stream in streams]
        told[0].extend(islice(streams[0], random.Random(victim).randrange(8)))
        killed = two_stages.pid_of("worker", victim)
        os.kill(killed, number)
        if number is signal.SIGSTOP:
            acted_s = wait_until(lambda: not is_alive(killed), STOPPED_S, "a stopped stage is given up")
            print(f"stage {victim}: acted on after {acted_s:.1f} s")
        for parts, stream in zip(told, streams, strict=True):
            parts.extend(stream)
        for parts, whole in zip(told, expected, strict=True):
            assert parts[-1].finish_reason == "length"
            assert "".join(part.text for part in parts) == whole.text
        assert two_stages.pid_of("worker", victim) != killed


@pytest.mark.full
@pytest.mark.parametrize(("count", "layout"), [(2, (1, 2)), (2, (2, 2)), (4, (2, 2)), (2, (4, 1))])
def test_layouts_of_stages_and_ranks_over_nodes_have_the_tokens_of_one_stage(
    count: int, layout: tuple[int, int]
) -> None:
    """Ranks that add up over two nodes; stages with both ranks on a node, and with ranks on two; two
    stages on each node.
    """
    settings = (*SMALL_POOL, "--tp-size", str(layout[1]))
    with launched(*settings) as alone, Client(alone.run_dir) as client:
        expected = tokens_of(client, NUM_ON_NODES)
    with nodes(*SMALL_POOL, count=count, layout=layout) as several, Client(several.run_dir) as client:
        assert tokens_of(client, NUM_ON_NODES) == expected
        streams = streams_of(client, lambda: None)
        last = several.pid_of_rank(layout[0] * layout[1] - 1)
        assert streams_of(client, lambda: os.kill(last, signal.SIGKILL)) == streams


def test_ctrl_c_on_node_0_ends_all_and_leaves_nothing(two_nodes: Nodes) -> None:
    """The last test of the launch that files of this folder share."""
    pids = [*two_nodes.zero.pids(), *two_nodes.other.pids()]
    assert two_nodes.zero.stop() == 0
    assert two_nodes.other.wait_exit(3.0) == 0
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 5.0, "all processes end")
    assert not leftovers(two_nodes.zero.run_dir)
    assert not leftovers(two_nodes.other.run_dir)
