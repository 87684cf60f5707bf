"""The links between pipeline stages, within a machine and between two: what comes through, in which order,
and what ends them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed.distributed_c10d import Store

from model_worker.distributed.group import GroupError
from model_worker.distributed.layout import Layout
from model_worker.distributed.link_end import Waiting
from model_worker.distributed.network_link import GIVER, TAKER, NetworkTakingEnd
from model_worker.distributed.node_meeting import NodeMeeting
from model_worker.distributed.stage_link import HIDDEN_SLOTS, SlotSizes, StageLink
from model_worker.distributed.torch_group import LOOPBACK, meeting_at, meeting_in
from tests.harness.ring.launched import ROOT, SLACK, wait_until

WIDTH = 6
MAX_TOKENS = 5
SIZES = SlotSizes(MAX_TOKENS * WIDTH * 4, 8 * 8, torch.float32, WIDTH)


JOIN_S = 60.0


def meeting(folder: Path, rank: int, num_ranks: int, ranks_per_node: int) -> NodeMeeting:
    """Return what a rank of a node meets others by; all nodes are this machine."""
    return NodeMeeting(
        meeting_in(folder, num_ranks),
        lambda other: other // ranks_per_node == rank // ranks_per_node,
        address=LOOPBACK,
        join_timeout_s=JOIN_S,
    )


@contextmanager
def links(
    folder: Path, num_stages: int, tp_size: int = 1, late_s: float = 5.0, num_nodes: int = 1
) -> Iterator[list[StageLink]]:
    num_ranks = num_stages * tp_size

    def join(rank: int) -> StageLink:
        return StageLink(
            folder,
            Layout.of_rank(rank, num_stages, tp_size),
            SIZES,
            join_timeout_s=JOIN_S,
            on_wait=lambda: None,
            late_s=late_s,
            meeting=meeting(folder, rank, num_ranks, num_ranks // num_nodes) if num_nodes > 1 else None,
        )

    with ThreadPoolExecutor(num_stages * tp_size) as pool:
        made = list(pool.map(join, range(num_stages * tp_size)))
    try:
        yield made
    finally:
        for link in made:
            link.close()


def hidden(step: int, num_tokens: int) -> list[torch.Tensor]:
    return [torch.full((num_tokens, WIDTH // 2), step + part / 2) for part in range(2)]


def give_all(link: StageLink) -> None:
    for step in range(1, 9):
        link.give_hidden(step, hidden(step, 1))


MORE_LAYOUTS = ((2, 1, 1), (2, 1, 2), (3, 1, 3), (2, 2, 2))


@pytest.mark.parametrize(
    ("num_stages", "tp_size", "num_nodes"),
    [
        *((3, 1, 1), (2, 2, 1), (4, 1, 2), (2, 2, 4)),
        *(pytest.param(*each, marks=pytest.mark.full) for each in MORE_LAYOUTS),
    ],
)
def test_steps_go_round_in_their_order(num_stages: int, tp_size: int, num_nodes: int, tmp_path: Path) -> None:
    """There are more of them than slots; each rank has the one of its own part in the next stage."""
    with links(tmp_path, num_stages, tp_size, num_nodes=num_nodes) as made:

        def compute(link: StageLink) -> list[float]:
            seen = []
            for step in range(1, 4 * HIDDEN_SLOTS):
                n = step % MAX_TOKENS
                value = float(step)
                if not link.layout.is_first:
                    parts = link.take_hidden(step, n).view(2, n, WIDTH // 2)
                    assert all(
                        (part == want).all() for part, want in zip(parts, hidden(step, n), strict=True)
                    )
                    link.let_go()
                if link.layout.is_last:
                    link.give_tokens(step, torch.tensor([step, 100 + link.layout.tp_rank]))
                else:
                    link.give_hidden(step, hidden(step, n))
                if link.layout.is_first:
                    tokens = link.take_tokens(step)
                    assert tokens.tolist() == [step, 100 + link.layout.tp_rank]
                seen.append(value)
            return seen

        with ThreadPoolExecutor(len(made)) as pool:
            results = list(pool.map(compute, made))
        assert all(len(seen) == 4 * HIDDEN_SLOTS - 1 for seen in results)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_tokens_that_nobody_takes_hold_up_nobody(num_nodes: int, tmp_path: Path) -> None:
    """The link holds the most there can be: a step more than stages in flight, and the computed one. One that
    has sampled nothing has none.
    """
    with links(tmp_path, 2, num_nodes=num_nodes) as (first, last):
        assert not first.has_tokens
        for step in range(1, 5):
            last.give_tokens(step, torch.tensor([step] * (step != 3)))
        wait_until(lambda: first.has_tokens, 5.0, "tokens come")
        assert [first.take_tokens(step).tolist() for step in range(1, 5)] == [[1], [2], [], [4]]
        assert not first.has_tokens


def test_a_stage_of_another_machine_waits_for_room_at_both_ends(tmp_path: Path) -> None:
    """Slots of the giving end are free once the taking end has room; nobody's data is written over."""
    num_held = 2 * HIDDEN_SLOTS
    with links(tmp_path, 2, num_nodes=2) as (first, last):
        for step in range(1, num_held + 1):
            first.give_hidden(step, hidden(step, 1))
        one_more = threading.Thread(target=first.give_hidden, args=(num_held + 1, hidden(9, 1)))
        one_more.start()
        one_more.join(0.2)
        assert one_more.is_alive()
        for step in range(1, num_held + 1):
            assert last.take_hidden(step, 1).flatten().tolist() == [step] * 3 + [step + 0.5] * 3
            last.let_go()
        one_more.join(10.0)
        assert not one_more.is_alive()


def test_a_stage_waits_for_a_slot_that_is_free_again(tmp_path: Path) -> None:
    with links(tmp_path, 2) as (first, last):
        for step in range(1, HIDDEN_SLOTS + 1):
            first.give_hidden(step, hidden(step, 1))
        one_more = threading.Thread(target=first.give_hidden, args=(HIDDEN_SLOTS + 1, hidden(9, 1)))
        one_more.start()
        assert float(last.take_hidden(1, 1)[0]) == 1.0
        assert one_more.is_alive()
        last.let_go()
        one_more.join(10.0)
        assert not one_more.is_alive()
        assert float(last.take_hidden(2, 1)[0]) == 2.0


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_step_out_of_turn_ends_the_link(num_nodes: int, tmp_path: Path) -> None:
    with links(tmp_path, 2, num_nodes=num_nodes) as (first, last):
        first.give_hidden(2, hidden(2, 1))
        with pytest.raises(GroupError, match="stage 0 gave step 2 where step 1 was due"):
            last.take_hidden(1, 1)


def test_a_step_of_another_size_ends_the_link(tmp_path: Path) -> None:
    with links(tmp_path, 2) as (first, last):
        first.give_hidden(1, hidden(1, 2))
        with pytest.raises(GroupError, match="2 tokens of step 1, not 3"):
            last.take_hidden(1, 3)


def test_an_end_is_seen_by_both_neighbours_at_once(tmp_path: Path) -> None:
    with links(tmp_path, 3, late_s=60.0) as (first, second, third):
        second.close()
        began = time.monotonic()
        with pytest.raises(GroupError, match="pipeline stage 1 has ended"):
            third.take_hidden(1, 1)
        with pytest.raises(GroupError, match="pipeline stage 1 has ended"):
            give_all(first)
        assert time.monotonic() - began < 4.0 * SLACK


GIVER_OF_A_STEP = """
import signal, sys
from pathlib import Path
from model_worker.distributed.network_link import NetworkGivingEnd
from tests.cpu.parallel.test_stage_link import *
link = meeting(Path(sys.argv[1]), 0, 2, 1).link(0, GIVER)
end = NetworkGivingEnd(link, 8, 2, stage=1, waiting=Waiting(lambda: None, 60.0))
end.send(1, 1, [torch.tensor([5])])
signal.pause()
"""


@pytest.mark.full
def test_a_process_of_another_machine_that_is_killed_is_seen_at_once(tmp_path: Path) -> None:
    giver = subprocess.Popen([sys.executable, "-c", GIVER_OF_A_STEP, str(tmp_path)], cwd=ROOT)
    try:
        link = meeting(tmp_path, 1, 2, 1).link(0, TAKER)
        end = NetworkTakingEnd(link, 8, 2, stage=0, waiting=Waiting(lambda: None, 60.0))
        assert end.receive(1) == 1
        assert end.slot().view(torch.int64).tolist() == [5]
        end.let_go()
        giver.kill()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(GroupError, match="pipeline stage 0 has ended"):
                end.receive(2)
        assert time.monotonic() - began < 5.0 * SLACK
    finally:
        giver.kill()
        giver.wait()


def test_a_rank_of_another_machine_that_does_not_come_ends_the_start() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:

        def meet(timeout: timedelta) -> Store:
            port, fd = listener.getsockname()[1], listener.fileno()
            return meeting_at(LOOPBACK, port, listener_fd=fd, name="epoch1", timeout=timeout)

        alone = NodeMeeting(meet, lambda rank: False, address=LOOPBACK, join_timeout_s=0.2)
        with pytest.raises(GroupError, match="ranks on other machines do not come"):
            alone.link(0, GIVER)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_who_does_not_come_is_named(num_nodes: int, tmp_path: Path) -> None:
    with (
        links(tmp_path, 2, late_s=0.05, num_nodes=num_nodes) as (_, last),
        pytest.raises(GroupError, match="stage 0 has not come"),
    ):
        last.take_hidden(1, 1)
    layout = Layout.of_rank(0, 2, 1)
    (tmp_path / "alone").mkdir()
    with pytest.raises(GroupError, match="rank 1 of the pipeline has not started in time"):
        StageLink(tmp_path / "alone", layout, SIZES, join_timeout_s=0.1, on_wait=lambda: None)
