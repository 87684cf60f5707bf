"""A comparison's bookkeeping: whose turn it is, what is left, and what the runs say."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cpu.floor import Machine, ModelShape
from benchmarks.cpu.report import best_tries, share_of_floor, summarize
from benchmarks.cpu.runs import WARM_UP, Server, Turn, all_turns, read_runs, seed_of, turns_left
from benchmarks.process_cpu import pss_bytes, tree_cpu

MODEL = ModelShape(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=8192,
)


def _run(number: int, server: str, tokens_per_s: float, **more: float) -> dict[str, Any]:
    figures = {"output_throughput": tokens_per_s, "duration": 8192 / tokens_per_s}
    return {"round": number, "workload": "w1", "server": server, "figures": figures, **more}


def test_a_server_is_a_name_a_back_end_an_address_and_maybe_a_process() -> None:
    assert Server.parse("a=carousel@http://127.0.0.1:1") == Server("a", "carousel", "http://127.0.0.1:1")
    assert Server.parse("b=vllm@http://127.0.0.1:1#42").pid == 42
    for text in ("carousel@http://x", "a=http://x", "a=carousel@", "=a@b", "a=b@c#", "a=b@c#d"):
        with pytest.raises(argparse.ArgumentTypeError, match="NAME=BACKEND@URL"):
            Server.parse(text)


def test_servers_take_turns_within_a_workload_and_a_round_warms_up() -> None:
    servers = [Server(name, "openai", "http://127.0.0.1:1") for name in "ab"]
    keys = [turn.key for turn in all_turns(1, ["w1", "w2"], servers)]
    assert keys[:4] == [(WARM_UP, w, s) for w in ("w1", "w2") for s in "ab"]
    assert keys[4:] == [(WARM_UP + 1, w, s) for w in ("w1", "w2") for s in "ab"]


def test_a_report_has_medians_ratios_and_shares_of_the_rounds_that_count() -> None:
    runs = [_run(WARM_UP, "ours", 1.0), _run(WARM_UP, "other", 9e9)]
    runs += [_run(number, "ours", tokens, pss_mib=500.0) for number, tokens in enumerate((300, 100, 200), 1)]
    runs += [_run(1, "other", 50.0)]
    machine = Machine(95.5, 1054.0)
    report = summarize(runs, ["w1"], ["ours", "other"], MODEL, machine)["w1"]
    assert report["output_throughput"]["ours"]["median"] == 200
    assert report["output_throughput"]["ours"]["range"] == [100, 300]
    assert report["output_throughput"]["other"]["ratio"] == 4.0
    assert 0 < report["output_throughput"]["ours"]["of_floor"] < 1
    assert report["pss_mib"]["ours"]["median"] == 500.0
    assert "other" not in report["pss_mib"]


def test_a_disturbed_run_is_made_again_and_the_least_disturbed_one_counts() -> None:
    servers = [Server(name, "openai", "http://127.0.0.1:1") for name in "ab"]
    runs = [_run(0, "a", 1.0, others_cores=0.0), _run(0, "b", 1.0, others_cores=0.3)]
    runs += [_run(1, "b", 1.0, others_cores=others) for others in (0.5, 0.2, 0.9)]

    def left(max_others: float, max_tries: int) -> list[tuple[int, str, str]]:
        turns = turns_left(all_turns(1, ["w1"], servers), runs, max_others, max_tries)
        return [turn.key for turn in turns]

    assert left(0.1, 3) == [(0, "w1", "b"), (1, "w1", "a")]
    assert left(0.1, 4) == [(0, "w1", "b"), (1, "w1", "a"), (1, "w1", "b")]
    assert left(0.3, 4) == [(1, "w1", "a")]
    assert [run["others_cores"] for run in best_tries(runs)] == [0.0, 0.3, 0.2]


def test_a_run_that_is_made_again_has_prompts_that_no_cache_knows() -> None:
    server = Server("a", "openai", "http://127.0.0.1:1")
    rounds = [Turn(number, "w1", server) for number in range(6)]
    first = [seed_of(turn, [], 7) for turn in rounds]
    again = [seed_of(turn, [_run(turn.round, "a", 1.0)], 7) for turn in rounds]
    assert len({*first, *again}) == 12
    assert seed_of(rounds[1], [_run(1, "b", 1.0), _run(2, "a", 1.0)], 7) == first[1], "another turn's runs"


def test_a_workload_that_repeats_another_has_its_last_prompts() -> None:
    server = Server("a", "openai", "http://127.0.0.1:1")
    cold, warm = Turn(2, "w4", server), Turn(2, "w4-warm", server)
    once = _run(2, "a", 1.0) | {"workload": "w4"}
    for runs in ([], [once]):
        assert seed_of(warm, [*runs, once], 7) == seed_of(cold, runs, 7)
        assert seed_of(warm, [*runs, once, _run(2, "a", 1.0) | {"workload": "w4-warm"}], 7) == seed_of(
            cold, runs, 7
        )


def test_nobody_is_below_the_floor_whichever_way_a_figure_is_better() -> None:
    assert share_of_floor("output_throughput", 50.0, 100.0) == 0.5
    assert share_of_floor("duration", 200.0, 100.0) == 0.5


def test_a_file_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert read_runs(tmp_path / "none.jsonl") == []


def test_memory_of_a_tree_is_at_least_that_of_its_root() -> None:
    assert pss_bytes(os.getpid()) > 10 * 2**20
    assert pss_bytes(2**22 + 1) == tree_cpu(2**22 + 1) == 0
    assert tree_cpu(os.getpid()) > 0
