"""A launch over two nodes, as a user meets it: the tokens of one machine, and deaths of ranks and agents.

The "nodes" share nothing but this machine: they have networks of their own, else addresses of their own, and
run directories of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from carousel import Client, ConfigError, GenerationExecutor, RingClosed, SamplingParams
from carousel.client.connection.target import find_run_dir
from tests.cpu.parallel.test_tensor_parallel_launch import mixed_requests
from tests.harness.nodes import NUM_PORTS, OTHER, POOL, Nodes, ids_of, listening_hosts, listening_names
from tests.harness.ring.launched import ROOT, SLACK, START_S, Launched, free_ports, is_alive, wait_until

NUM_REQUESTS = 12
NUM_STREAMS = 6
STREAM_TOKENS = 48
TIMEOUT_S = 240.0


def tokens_of(client: Client) -> list[list[int]]:
    """Tokens of requests of all kinds, by ids: the launch has no tokenizer."""
    _, sampling = mixed_requests()
    prompts = [ids_of(number)[: 2 + number] for number in range(NUM_REQUESTS)]
    done = client.generate(prompts, sampling[:NUM_REQUESTS], timeout=TIMEOUT_S)
    return [list(completion.token_ids) for completion in done]


def streams_of(client: Client, meanwhile: Callable[[], None]) -> list[list[int]]:
    """Tokens of streams, in the middle of which something is done."""
    wanted = [
        SamplingParams(
            max_tokens=STREAM_TOKENS,
            ignore_eos=True,
            seed=n,
            temperature=float(n % 2),
            min_tokens=STREAM_TOKENS,
        )
        for n in range(NUM_STREAMS)
    ]
    streams = [client.stream(ids_of(n), sampling) for n, sampling in enumerate(wanted)]
    firsts = [next(stream) for stream in streams]
    meanwhile()
    rests = [list(stream) for stream in streams]
    assert all(rest[-1].finish_reason == "length" for rest in rests)
    return [
        [token for output in (first, *rest) for token in output.token_ids]
        for first, rest in zip(firsts, rests, strict=True)
    ]


def test_nobody_listens_at_another_address_than_his_nodes(two_nodes: Nodes) -> None:
    """Not at 0.0.0.0, where torch's store listens by itself."""
    here = [child["pid"] for child in two_nodes.zero.state()["children"] if child["node"] == 0]
    assert listening_hosts(two_nodes.other.pids()) == {two_nodes.hosts[1]}
    assert listening_hosts([two_nodes.zero.process.pid, *here]) == {two_nodes.hosts[0]}


def test_ranks_have_no_socket_of_clients(two_nodes: Nodes) -> None:
    """Nor one of other processes: tokenizers and detokenizers alone hear clients."""
    names = {
        (child["role"], child["index"]): listening_names(child["pid"])
        for child in two_nodes.zero.state()["children"]
    }
    assert "tokenizer_in0" in names["tokenizer", 0]
    assert "client_out0" in names["detokenizer", 0]
    others = set().union(*(names[place] for place in names if place[0] != "worker"))
    assert [f"rank_in{rank}" in names["worker", rank] for rank in range(2)] == [True, False]
    assert not any(names["worker", rank] & others for rank in range(2))


def test_who_asks_another_node_is_told_where_requests_go(two_nodes: Nodes) -> None:
    told = f"run_dir: .* is that of node 1, which has ranks .* they go to node 0, at {two_nodes.hosts[0]}"
    with pytest.raises(ConfigError, match=told):
        Client(two_nodes.other.run_dir)
    with pytest.raises(ConfigError, match=told):
        GenerationExecutor.create(run_dir=two_nodes.other.run_dir)


@pytest.fixture(scope="module")
def expected_streams(two_nodes: Nodes) -> list[list[int]]:
    with Client(two_nodes.run_dir) as client:
        return streams_of(client, lambda: None)


def test_two_nodes_have_the_tokens_of_one_rank(two_nodes: Nodes, demo_launch: Launched) -> None:
    with Client(demo_launch.run_dir) as client:
        expected = tokens_of(client)
    with Client(two_nodes.run_dir) as client:
        assert tokens_of(client) == expected
    children = [child for child in two_nodes.zero.state()["children"] if child["role"] == "worker"]
    assert [(child["index"], child["node"]) for child in children] == [(0, 0), (1, 1)]
    assert [child["pid"] for child in children] == [two_nodes.pid_of_rank(rank) for rank in range(2)]
    assert len({child["pid"] for child in children}) == 2


@pytest.mark.full
@pytest.mark.parametrize("rank", range(2))
def test_a_killed_rank_costs_no_request(
    two_nodes: Nodes, expected_streams: list[list[int]], rank: int
) -> None:
    two_nodes.wait_whole()
    epoch = two_nodes.zero.state()["epoch"]
    with Client(two_nodes.run_dir) as client:
        got = streams_of(client, lambda: os.kill(two_nodes.pid_of_rank(rank), signal.SIGKILL))
    assert got == expected_streams
    assert two_nodes.zero.state()["epoch"] > epoch


@pytest.mark.full
def test_a_killed_agent_that_comes_back_costs_no_request(
    two_nodes: Nodes, expected_streams: list[list[int]]
) -> None:
    """The test starts it again, as Slurm, Kubernetes or systemd do."""
    two_nodes.wait_whole()
    ranks = []

    def kill_agent() -> None:
        ranks.append(two_nodes.pid_of_rank(1))
        two_nodes.other.process.kill()
        began = time.monotonic()
        wait_until(lambda: not is_alive(ranks[0]), 1.0, "its rank ends with it")
        wait_until(lambda: two_nodes.zero.state()["epoch"] > epoch, 1.0, "node 0 sees that it is gone")
        print(f"seen after {time.monotonic() - began:.2f} s")
        two_nodes.replace_other()

    epoch = two_nodes.zero.state()["epoch"]
    with Client(two_nodes.run_dir) as client:
        assert streams_of(client, kill_agent) == expected_streams


@pytest.mark.full
@pytest.mark.parametrize("role", ["agent", "rank"])
def test_a_stopped_process_on_another_node_costs_no_request(
    two_nodes: Nodes, expected_streams: list[list[int]], role: str
) -> None:
    """Node 0 gives up an agent that says nothing; one that goes on then joins anew."""
    two_nodes.wait_whole()
    other = two_nodes.other
    pid = other.process.pid if role == "agent" else two_nodes.pid_of_rank(1)
    epoch = two_nodes.zero.state()["epoch"]

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        seen_s = wait_until(lambda: two_nodes.zero.state()["epoch"] > epoch, 5.0, "node 0 acts")
        print(f"a stopped {role}: acted on after {seen_s:.1f} s")
        if role == "agent":
            os.kill(pid, signal.SIGCONT)

    with Client(two_nodes.run_dir) as client:
        assert streams_of(client, stop) == expected_streams


def test_ranks_of_both_nodes_are_called_between_the_same_two_steps(
    two_nodes: Nodes, expected_streams: list[list[int]]
) -> None:
    """In the middle of streams. All else about calls: test_collective_rpc.py, of the same launch; after a
    second in which the nodes did not hear of each other: test_node_deaths.py.
    """
    epoch = two_nodes.zero.state()["epoch"]
    with Client(two_nodes.run_dir) as client:

        def call() -> None:
            for _ in range(10):
                answers = client.collective_rpc("ping", timeout=60.0)
                assert [answer["rank"] for answer in answers] == [0, 1]
                assert len({answer["num_steps"] for answer in answers}) == 1

        assert streams_of(client, call) == expected_streams
        assert [answer["rank"] for answer in client.collective_rpc("ping", ranks=[1])] == [1]
    assert two_nodes.zero.state()["epoch"] == epoch


def test_a_node_that_does_not_come_is_named() -> None:
    both = Nodes("--start-timeout", "0.2", *POOL, has_other=False)
    try:
        wait_until(lambda: "waiting for node 1" in both.zero.log(), 5.0, "node 0 waits")
        assert both.zero.wait_exit(0.2 + 2.0) == 70
        assert "nodes: node 1: not there within 0.2 s" in both.zero.log()
    finally:
        both.close()


@pytest.mark.full
def test_a_node_with_another_page_size_ends_the_start_at_both_ends() -> None:
    both = Nodes(*POOL, of_other=("--page-size", "8"))
    try:
        wait_until(lambda: "waits for node 0" in both.other.log(), 5.0, "the agent begins")
        assert (both.other.wait_exit(2.0), both.zero.wait_exit(2.0)) == (64, 64)
        said = f"page_size of node 1 ({OTHER}) is not that of node 0: 8, and 4 on node 0"
        assert said in both.zero.log()
        assert said in both.other.log()
        assert "loading weights" not in both.zero.log()
    finally:
        both.close()


@pytest.mark.full
def test_a_node_with_another_key_ends_the_start_at_both_ends(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("x" * 64)
    key.chmod(0o600)
    both = Nodes(*POOL, of_other=("--node-key", str(key)))
    try:
        wait_until(lambda: "waits for node 0" in both.other.log(), 5.0, "the agent begins")
        told_s = wait_until(lambda: "has another key than node 0" in both.zero.log(), 2.0, "node 0 says so")
        print(f"node 0 says so after {told_s:.1f} s")
        assert (both.other.wait_exit(2.0), both.zero.wait_exit(2.0)) == (64, 64)
        assert "does not take this node's key" in both.other.log()
        assert "nodes: node_key: a node at 127.0.0.1 has another key" in both.zero.log()
    finally:
        both.close()


def state_of_only_launch() -> str:
    """State of the launch that this user's clients find."""
    try:
        return str(json.loads((find_run_dir() / "state.json").read_bytes())["state"])
    except (RingClosed, FileNotFoundError):
        return "absent"


@pytest.mark.full
def test_torchrun_starts_a_launcher_on_each_node(
    demo_launch: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of them each is, and where they meet, it reads in its environment."""
    with Client(demo_launch.run_dir) as client:
        expected = tokens_of(client)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("CAROUSEL_RUN_DIR", raising=False)
    port, dist_port = free_ports(1), free_ports(NUM_PORTS)
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--no-python"),
        *("--master-addr=127.0.0.1", f"--master-port={port}"),
    )
    launch = (
        *(sys.executable, "-m", "launch", "--executor=nodes", f"--dist-port={dist_port}", "--device=cpu"),
        *("--tp-size=2", "--cpu-threads=1", *POOL),
    )
    starters = [subprocess.Popen([*torchrun, f"--node-rank={rank}", *launch], cwd=ROOT) for rank in range(2)]
    try:
        wait_until(lambda: state_of_only_launch() == "ready", START_S, "the launch gets ready")
        with Client() as client:
            assert tokens_of(client) == expected
    finally:
        for starter in starters:
            starter.terminate()
        for starter in starters:
            starter.wait(SLACK * 10.0)
    assert state_of_only_launch() == "absent"
