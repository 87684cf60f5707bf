"""The links between pipeline stages: what comes through, in which order, and what ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from model_worker.distributed.group import GroupError
from model_worker.distributed.layout import Layout
from model_worker.distributed.stage_link import HIDDEN_SLOTS, SlotSizes, StageLink

WIDTH = 6
MAX_TOKENS = 5
SIZES = SlotSizes(MAX_TOKENS * WIDTH * 4, 8 * 8, torch.float32, WIDTH)


@contextmanager
def links(folder: Path, num_stages: int, tp_size: int = 1, late_s: float = 5.0) -> Iterator[list[StageLink]]:
    def join(rank: int) -> StageLink:
        layout = Layout.of_rank(rank, num_stages, tp_size)
        return StageLink(folder, layout, SIZES, join_timeout_s=20.0, on_wait=lambda: None, late_s=late_s)

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


@pytest.mark.parametrize(("num_stages", "tp_size"), [(2, 1), (3, 1), (2, 2)])
def test_steps_go_round_in_their_order(num_stages: int, tp_size: int, tmp_path: Path) -> None:
    """More of them than there are slots; each rank has the one of its own part in the next stage."""
    with links(tmp_path, num_stages, tp_size) as made:

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


def test_tokens_that_nobody_takes_hold_up_nobody(tmp_path: Path) -> None:
    """The link holds the most there can be: a step more than stages in flight, and the computed one."""
    with links(tmp_path, 2) as (first, last):
        assert not first.has_tokens
        for step in range(1, 5):
            last.give_tokens(step, torch.tensor([step]))
        assert first.has_tokens
        assert [first.take_tokens(step).tolist() for step in range(1, 5)] == [[1], [2], [3], [4]]
        assert not first.has_tokens


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


def test_a_step_out_of_turn_ends_the_link(tmp_path: Path) -> None:
    with links(tmp_path, 2) as (first, last):
        first.give_hidden(2, hidden(2, 1))
        with pytest.raises(GroupError, match="stage 0 gave step 2 where step 1 was due"):
            last.take_hidden(1, 1)


def test_a_step_of_another_size_ends_the_link(tmp_path: Path) -> None:
    with links(tmp_path, 2) as (first, last):
        first.give_hidden(1, hidden(1, 2))
        with pytest.raises(GroupError, match="2 tokens of step 1, not 3"):
            last.take_hidden(1, 3)


def test_an_end_is_seen_by_both_neighbours_at_once(tmp_path: Path) -> None:
    with links(tmp_path, 3) as (first, second, third):
        second.close()
        began = time.monotonic()
        with pytest.raises(GroupError, match="pipeline stage 1 has ended"):
            third.take_hidden(1, 1)
        with pytest.raises(GroupError, match="pipeline stage 1 has ended"):
            give_all(first)
        assert time.monotonic() - began < 4.0


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    with (
        links(tmp_path, 2, late_s=0.05) as (_, last),
        pytest.raises(GroupError, match="stage 0 has not come"),
    ):
        last.take_hidden(1, 1)
    layout = Layout.of_rank(0, 2, 1)
    (tmp_path / "alone").mkdir()
    with pytest.raises(GroupError, match="rank 1 of the pipeline has not started in time"):
        StageLink(tmp_path / "alone", layout, SIZES, join_timeout_s=0.1, on_wait=lambda: None)
