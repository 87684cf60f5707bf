"""Node 0's launcher and the agents of other nodes: who is taken in, what is told, and who is gone. Real
sockets in one process, no ranks.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq

from runtime.base.errors import ConfigError
from runtime.launcher.hosts.host import ProcessPlace, places
from runtime.launcher.nodes import agent_link, gate, node_settings, strangers
from runtime.launcher.nodes.agent_link import AgentLink, NodeZeroGone
from runtime.launcher.nodes.facts import SAMPLE_BYTES, facts_of, first_difference, weights_digest
from runtime.launcher.nodes.gate import NodeGate
from runtime.launcher.nodes.node_settings import with_nodes
from runtime.launcher.nodes.remote_host import LOST
from runtime.ring import nodes
from runtime.ring.node_messages import (
    KillRank,
    NodeBeat,
    NodeLeft,
    NodePing,
    RankBeat,
    RankEnded,
    Rejoin,
    StartRank,
    StopNode,
    ToAgent,
)
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.messages import ProcessReady
from runtime.wire.status_page import STATES, StatusPage
from tests.harness.nodes import FOURTH, HOST, OTHER, THIRD
from tests.harness.ring.launched import free_ports, wait_until

TWO = {"device": "cpu", "model": str(DEMO_MODEL), "tp_size": 2, "nnodes": 2}
RANK_1 = ProcessPlace("worker", 1, "worker:1", 1)


class Meeting:
    """A gate and, as they are asked for, agents."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack, self._folder = stack, folder
        self.key = folder / "key"
        self.key.write_text("k" * 64)
        self.key.chmod(0o600)
        self.port = free_ports(6, HOST)
        self.page = StatusPage(folder / "status", create=True, counts={"worker": 2})
        stack.callback(self.page.close)
        self.events: list[str] = []
        self.gate = NodeGate(self.settings(), self.page, lambda event, **_: self.events.append(event))
        stack.callback(self.gate.close)
        self.orders: list[ToAgent] = []

    def settings(self, **changed: object) -> RuntimeConfig:
        options = {"dist_addr": f"{HOST}:{self.port}", "node_key": str(self.key), **TWO, **changed}
        return with_nodes(msgspec.convert(options, RuntimeConfig))

    def agent(self, **changed: object) -> AgentLink:
        options: dict[str, object] = {"node_rank": 1, "node_addr": OTHER, **changed}
        link = AgentLink(self.settings(**options))
        self._stack.callback(link.close)
        return link

    def turn(self, *links: AgentLink) -> None:
        self.gate.turn()
        for link in links:
            self.orders += [order for order in link.turn() if not isinstance(order, NodePing)]

    def until(self, condition: Callable[[], bool], *links: AgentLink) -> None:
        def holds() -> bool:
            self.turn(*links)
            return condition()

        wait_until(holds, 2.0, "they hear of each other")


LINGER_MS = 20
"""Time enough, on this machine, for the last messages of a gate or an agent."""


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "LINGER_MS", LINGER_MS)
    monkeypatch.setattr(gate, "LINGER_MS", LINGER_MS)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    with ExitStack() as stack:
        yield Meeting(tmp_path, stack)


def test_an_agent_is_told_what_to_start_and_node_0_how_it_is(meeting: Meeting) -> None:
    assert meeting.gate.missing == ["node 1"]
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    assert not meeting.gate.missing
    host = meeting.gate.hosts[1]
    child = host.start(RANK_1, 7)
    meeting.until(lambda: meeting.orders == [StartRank(1, 7)], link)
    ready = STATES.index("ready")
    for heartbeat, stopped in ((1, False), (1, True)):
        link.send(NodeBeat((RankBeat(1, 7, 4711, ready, heartbeat, 0.5, stopped),)))
        meeting.until(
            partial(lambda wanted: child.beat is not None and child.is_stopped == wanted, stopped), link
        )
    slot = meeting.page.read("worker", 1)
    assert (slot.state, slot.epoch, slot.pid, slot.loaded, child.pid) == ("ready", 7, 0, 0.5, 4711)
    link.send(ProcessReady("worker:1", 7))
    link.send(ProcessReady("scheduler", 7))  # which is none of its processes
    link.send(RankEnded(1, 6, 1))  # one that was given up
    link.send(RankEnded(1, 7, -9))
    meeting.until(lambda: child.poll() is not None, link)
    assert meeting.gate.take_news() == [ProcessReady("worker:1", 7)]
    assert child.reap() == -9
    child.kill()
    child.kill()
    meeting.until(lambda: KillRank(1, 7) in meeting.orders, link)
    assert meeting.orders.count(KillRank(1, 7)) == 1


def test_a_heartbeat_is_as_old_as_the_last_change_of_it_by_the_clock_here(meeting: Meeting) -> None:
    """The clock of another machine has another beginning: its figure may lie in the future."""
    host = meeting.gate.hosts[1]
    host.join(b"peer", OTHER)
    host.start(RANK_1, 1)
    future = 1 << 62
    shown = [
        host.show(NodeBeat((RankBeat(1, 1, 5, 2, heartbeat, 1.0, False),)), now)[0][1].heartbeat_ns
        for heartbeat, now in ((future, 100), (future, 200), (future + 1, 300))
    ]
    assert shown == [100, 100, 300]
    assert not host.show(NodeBeat((RankBeat(1, 2, 5, 2, 1, 1.0, False),)), 400), "a rank of another epoch"


def test_an_agent_that_ends_is_seen_at_once(meeting: Meeting) -> None:
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    child = meeting.gate.hosts[1].start(RANK_1, 1)
    link.close()
    began = time.monotonic()
    meeting.until(lambda: child.poll() is not None)
    assert time.monotonic() - began < gate.SILENCE_S
    assert child.poll() == LOST
    (said,) = meeting.gate.take_news()
    assert (said.role, said.message) == ("worker:1", f"node 1 ({OTHER}) is gone: its agent has ended")  # type: ignore[union-attr]
    assert meeting.gate.missing == [f"node 1 ({OTHER})"]
    assert meeting.events == ["node_joined", "node_lost"]


def test_a_silent_agent_is_given_up_and_joins_anew_when_it_speaks(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    child = meeting.gate.hosts[1].start(RANK_1, 1)
    meeting.turn(link)
    monkeypatch.setattr(gate, "SILENCE_S", 0.2)
    meeting.until(lambda: child.poll() is not None)  # the link takes no turn: it says nothing
    monkeypatch.undo()
    meeting.orders.clear()
    link.send(NodeBeat(()))
    meeting.until(lambda: Rejoin() in meeting.orders, link)
    assert not link.is_joined
    meeting.until(lambda: link.is_joined and not meeting.gate.missing, link)


def test_time_in_which_the_launcher_was_held_up_counts_against_nobody(meeting: Meeting) -> None:
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    meeting.gate._looked_at -= 60.0
    meeting.gate.turn()
    assert not meeting.gate.missing
    assert meeting.gate.hosts[1].silent_s <= gate.MAX_LOOK_S + 0.5


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"page_size": 32}, f"page_size of node 1 ({OTHER}) is not that of node 0: 32, and 16 on node 0"),
        ({"context_length": 64}, "context_length of node 1"),
        ({"load_format": "dummy"}, "load_format of node 1"),
    ],
)
def test_a_node_with_other_settings_is_refused_at_both_ends(
    meeting: Meeting, changed: dict[str, object], said: str
) -> None:
    link = meeting.agent(**changed)
    with pytest.raises(ConfigError, match=said.split(" (")[0]):
        meeting.until(lambda: link.is_joined, link)
    assert meeting.gate.refusal.startswith(said)
    assert meeting.gate.missing


@pytest.mark.parametrize("differs", ["config.json", "model.safetensors"])
def test_a_node_with_another_model_is_refused_at_both_ends(
    meeting: Meeting, differs: str, tmp_path: Path
) -> None:
    """A byte of it is another one, in a place that changes no shape; the path may be."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    data = (model / differs).read_bytes()
    (model / differs).write_bytes(data + b"\n" if differs == "config.json" else data[:-1] + b"\x55")
    fact = "config.json" if differs == "config.json" else "weights"
    link = meeting.agent(model=str(model))
    with pytest.raises(ConfigError, match=f"{fact} of node 1 .*; give all nodes the same model"):
        meeting.until(lambda: link.is_joined, link)
    assert meeting.gate.refusal.startswith(f"{fact} of node 1")


@pytest.mark.parametrize("fact", ["version", "schema", "torch"])
def test_a_node_of_another_version_is_refused_at_both_ends(
    meeting: Meeting, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_link, "facts_of", lambda config: {**facts_of(config), fact: "0.0.1"})
    link = meeting.agent()
    with pytest.raises(ConfigError, match=f"{fact} of node 1 .*; install the same on all nodes"):
        meeting.until(lambda: link.is_joined, link)
    assert meeting.gate.refusal.startswith(f"{fact} of node 1")
    assert meeting.events == ["node_refused"]


def test_a_second_node_of_one_number_is_refused_and_the_first_one_stays(meeting: Meeting) -> None:
    first = meeting.agent()
    meeting.until(lambda: first.is_joined, first)
    second = meeting.agent()
    first.send(NodeBeat(()))
    with pytest.raises(ConfigError, match=r"node_rank: node 1 .* is there already"):
        meeting.until(lambda: second.is_joined, first, second)
    assert not meeting.gate.refusal, "the launch goes on"
    assert not meeting.gate.missing


def write_key(path: Path, letter: str = "x") -> str:
    path.write_text(letter * 64)
    path.chmod(0o600)
    return str(path)


def test_a_wrong_key_is_said_at_both_ends_and_reaches_nothing(
    meeting: Meeting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 0 says it at the first attempt, and ends its start at the third, as the agent does."""
    began = time.monotonic()
    link = meeting.agent(node_key=write_key(tmp_path / "other_key"))
    with pytest.raises(ConfigError, match=r"node_key: .* does not take this node's key"):
        meeting.until(lambda: link.is_joined, link)
    said = "node_key: a node at 127.0.0.1 has another key than node 0; give all nodes the same file"
    assert meeting.gate.stranger == said
    meeting.until(lambda: meeting.gate.refusal == said)
    print(f"both have given up after {time.monotonic() - began:.1f} s")
    assert caplog.messages == [f"a node is refused: {said}"]
    assert meeting.gate.missing == ["node 1"]
    assert meeting.events == ["node_refused"]


def test_a_wrong_key_is_said_where_the_kernel_lists_no_connections(
    meeting: Meeting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "CONNECTIONS", tmp_path / "nothing")
    # Node 0 waits for the kernel for half a second, in which the agent could make all of its attempts.
    monkeypatch.setattr(agent_link, "RECONNECT_MS", 5000)
    link = meeting.agent(node_key=write_key(tmp_path / "other_key"))
    meeting.until(lambda: meeting.gate.stranger != "", link)
    assert meeting.gate.stranger.startswith("node_key: a node has another key than node 0; ")
    assert not meeting.gate.refusal, "one attempt may be somebody else's"


def test_a_node_with_the_right_key_joins_beside_one_with_another(meeting: Meeting, tmp_path: Path) -> None:
    meeting.agent(node_key=write_key(tmp_path / "other_key"))
    meeting.until(lambda: meeting.gate.stranger != "")
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    assert not meeting.gate.missing


def test_an_agent_whose_key_has_ended_node_0_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 may have counted another agent's attempts as well, and be gone at this one's third."""
    monkeypatch.setattr(agent_link, "GONE_S", 0.1)
    monkeypatch.setattr(agent_link, "PROBE_S", 0.01)
    with ExitStack() as stack, ExitStack() as own:
        meeting = Meeting(tmp_path, own)
        key = write_key(tmp_path / "other_key")
        link = AgentLink(meeting.settings(node_rank=1, node_addr=OTHER, node_key=key))
        stack.callback(link.close)
        meeting.until(lambda: meeting.gate.stranger != "")
        own.close()
        with pytest.raises(ConfigError, match=r"node_key: .* does not take this node's key"):
            wait_until(lambda: bool(link.turn()) and False, 5.0, "it sees that")


def test_an_agent_waits_for_a_node_0_that_is_stopped(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel takes connections, which this end gives up after a while: that is no wrong key."""
    monkeypatch.setattr(nodes, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(agent_link, "BREAK_S", 0.1)
    monkeypatch.setattr(agent_link, "RECONNECT_MS", 10)
    meeting.gate.close()
    with socket.create_server((HOST, meeting.port + 1)):
        link = meeting.agent()
        deadline = time.monotonic() + 0.75
        while time.monotonic() < deadline:
            assert not link.turn()
            time.sleep(0.01)
        assert link._num_failed == 0


def test_who_has_no_key_reaches_nothing(meeting: Meeting) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{HOST}:{meeting.port + 1}")
        stranger.send(b"CRNH" + msgspec.msgpack.encode({"node": 1, "address": OTHER, "facts": {}}))
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            meeting.turn()
        assert not stranger.poll(0)
    assert not meeting.events
    assert not meeting.gate.stranger


def knock(meeting: Meeting, source: str) -> None:
    """Come once, from an address of its own, with another key."""
    count = meeting.gate._strangers.num_knocks(source)
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = public, secret, public
        stranger.connect(f"tcp://{source}:0;{HOST}:{meeting.port + 1}")
        meeting.until(lambda: meeting.gate._strangers.num_knocks(source) > count)


def test_a_start_is_ended_by_one_who_comes_again_and_again_and_not_by_several(meeting: Meeting) -> None:
    """Each of them comes less often than an agent of this launch that has another key."""
    for source in (OTHER, THIRD, FOURTH, THIRD):
        knock(meeting, source)
    assert meeting.gate.stranger.startswith(f"node_key: a node at {THIRD} has another key than node 0")
    assert not meeting.gate.refusal
    knock(meeting, THIRD)
    assert meeting.gate.refusal == meeting.gate.stranger
    assert meeting.events == ["node_refused"] * 4


CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160),
        CURVE_GREETING[:30],
        CURVE_GREETING,
        CURVE_GREETING + b"\x04\x05\x05HELLO",
    ],
    ids=["nothing", "HTTP", "TLS", "half a greeting", "a greeting", "no HELLO of CURVE"],
)
def test_a_scanner_of_ports_neither_ends_a_start_nor_is_named(meeting: Meeting, said: bytes) -> None:
    """It comes as often as it likes, and an agent joins after it."""
    for _ in range(2 * gate.MAX_KNOCKS):
        with socket.create_connection((HOST, meeting.port + 1), 5.0) as scanner:
            scanner.sendall(said)
            meeting.turn()
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    assert meeting.events == ["node_joined"]
    assert not meeting.gate.stranger
    assert not meeting.gate.refusal


def test_what_no_agent_says_is_dropped(meeting: Meeting) -> None:
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    for frame in (b"", b"CRNH", b"CRNH\xc1", b"CRSL" + bytes(40), bytes(1000)):
        link.socket.send(frame)
    link.socket.send_multipart([b"CRNH", b"more"])
    link.send(NodeLeft("it was stopped"))
    meeting.until(lambda: bool(meeting.gate.missing))
    assert meeting.gate._bad_frames.count == 5
    with pytest.raises(ConfigError, match="version: node 0 cannot read this node's first words"):
        meeting.until(lambda: False, link)


def test_the_end_of_a_launch_is_told_with_its_reason(meeting: Meeting) -> None:
    link = meeting.agent()
    meeting.until(lambda: link.is_joined, link)
    gate.GOODBYE_S, kept = 0.1, gate.GOODBYE_S
    try:
        meeting.gate.stop("worker:0: out of memory", 70)
    finally:
        gate.GOODBYE_S = kept
    meeting.until(lambda: StopNode("worker:0: out of memory", 70) in meeting.orders, link)


def test_an_agent_ends_when_node_0_has_ended_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_link, "GONE_S", 0.1)
    monkeypatch.setattr(agent_link, "PROBE_S", 0.01)
    with ExitStack() as stack, ExitStack() as own:
        meeting = Meeting(tmp_path, own)
        link = AgentLink(meeting.settings(node_rank=1, node_addr=OTHER))
        stack.callback(link.close)
        meeting.until(lambda: link.is_joined, link)
        own.close()
        with pytest.raises(NodeZeroGone, match=f"node 0 at {HOST} has ended"):
            wait_until(lambda: bool(link.turn()) and False, 5.0, "it sees that")


# -- facts -------------------------------------------------------------------------------------------------


def test_weights_of_one_shape_and_other_values_have_another_digest(tmp_path: Path) -> None:
    data = bytearray((DEMO_MODEL / "model.safetensors").read_bytes())
    digests = {weights_digest(DEMO_MODEL)}
    for at in (len(data) - 1, len(data) // 63 * 30 + SAMPLE_BYTES // 2):
        changed = bytearray(data)
        changed[at] ^= 1
        (tmp_path / "model.safetensors").write_bytes(changed)
        digests.add(weights_digest(tmp_path))
    assert len(digests) == 3


def test_versions_are_compared_before_settings(meeting: Meeting) -> None:
    own = facts_of(meeting.settings())
    theirs = {**own, "version": "0.0.1", "page_size": "32"}
    assert first_difference(own, own, "node 1") == ""
    assert first_difference(own, theirs, "node 1").startswith(
        "version of node 1 is not that of node 0: 0.0.1"
    )
    assert "of_tomorrow of node 1" in first_difference(own, {**own, "of_tomorrow": "1"}, "node 1")


def test_stages_are_on_nodes_in_their_order() -> None:
    """The last one's first rank answers, over the network where the scheduler is on another node."""
    config = msgspec.convert({**TWO, "pp_size": 2}, RuntimeConfig)
    assert [config.node_of_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert (config.answering_rank, config.answers_here) == (2, False)
    config = msgspec.convert({**TWO, "tp_size": 4}, RuntimeConfig)
    assert (config.answering_rank, config.answers_here) == (0, True)
    options = {"dist_addr": f"{HOST}:29500", **TWO, "pp_size": 2, "tp_size": 4, "deterministic": True}
    assert with_nodes(msgspec.convert(options, RuntimeConfig)).deterministic, "each stage is on one node"


def test_ranks_are_on_nodes_in_their_order() -> None:
    config = msgspec.convert({**TWO, "tp_size": 4}, RuntimeConfig)
    workers = [place for place in places(config) if place.role == "worker"]
    assert [(place.index, place.node) for place in workers] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert {place.node for place in places(config) if place.role != "worker"} == {0}


# -- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nnodes": 1, "dist_addr": "127.0.0.2:1"}, "dist_addr: there is one node"),
        ({"nnodes": 1, "executor": "nodes", "dist_addr": ""}, "executor: nodes needs several"),
        ({"nnodes": 1, "executor": "ray", "dist_addr": ""}, "executor: ray needs several"),
        ({"executor": "ray", "node_rank": 1}, "node_rank: Ray starts the other nodes"),
        ({"executor": "local"}, "executor: local is one machine"),
        ({"node_rank": 2}, "node_rank: 2 is none of 2 nodes"),
        ({"tp_size": 1, "pp_size": 3}, "tp_size: 1 ranks in 3 stages cannot be shared evenly by 2 nodes"),
        ({"tp_size": 3}, "tp_size: 3 ranks cannot be shared evenly by 2 nodes"),
        ({"device": "cuda"}, "nnodes: several machines compute on their CPUs"),
        ({"deterministic": True, "tp_size": 4}, "deterministic: more than two ranks on several nodes"),
        ({"enable_lora": True}, "enable_lora: several nodes serve no adapters"),
        ({"dist_addr": ""}, "dist_addr: say at which address"),
        ({"dist_addr": "127.0.0.2:x"}, "dist_addr: 127.0.0.2:x is not HOST or HOST:PORT"),
        ({"dist_addr": "0.0.0.0:29500"}, "dist_addr: name one address"),
        ({"dist_addr": "10.1.2.3:29500"}, "dist_addr: tensors between nodes are not encrypted"),
        ({"dist_addr": "10.1.2.3:29500", "trusted_network": "no0"}, "trusted_network: no0 is no interface"),
        ({"dist_addr": "10.1.2.3", "trusted_network": "lo"}, "node_key: name the file"),
        ({"trusted_network": "lo"}, "trusted_network: 127.0.0.2 is this machine alone"),
        ({"node_addr": "10.1.2.3"}, "node_addr: 10.1.2.3 is no loopback address"),
        ({"node_addr": OTHER}, "dist_addr: 127.0.0.2 is not the address of node 0, which is 127.0.0.3"),
        ({"node_key": "/nowhere/key"}, "node_key: /nowhere/key cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, object], said: str) -> None:
    config = msgspec.convert({"dist_addr": f"{HOST}:29500", **TWO, **given}, RuntimeConfig)
    with pytest.raises(ConfigError) as refused:
        with_nodes(config)
    assert str(refused.value).startswith(said)


def test_a_key_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    for text, mode, said in (("k" * 64, 0o644, "readable by this user alone"), ("k" * 8, 0o600, "too few")):
        key.write_text(text)
        key.chmod(mode)
        options = {"dist_addr": f"{HOST}:29500", "node_key": str(key), **TWO}
        with pytest.raises(ConfigError, match=f"node_key: .*{said}"):
            with_nodes(msgspec.convert(options, RuntimeConfig))


def test_another_machine_needs_the_trusted_interface_and_gets_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_settings, "interface_address", lambda name: "10.0.0.7")
    key = tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(0o600)
    options = {
        "dist_addr": "10.0.0.1",
        "trusted_network": "eth1",
        "node_key": str(key),
        "node_rank": 1,
        **TWO,
    }
    config = with_nodes(msgspec.convert(options, RuntimeConfig))
    assert (config.node_addr, config.dist_addr, config.executor, config.no_http) == (
        *("10.0.0.7", "10.0.0.1:29500", "nodes"),
        True,
    )
