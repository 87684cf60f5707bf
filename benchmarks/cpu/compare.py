"""The same workloads against several servers of the same model, with the same client, in turns.

In each round every server gets the same prompts at the same times; one server under two names would find
them in its cache. Ratios are those of the first server to the others. Runs are kept in --runs, a file of JSON
lines: with --time-limit-s the comparison stops in time, and the same command again goes on where it was. A
run beside which other processes took more than --max-others cores does not count; it is made again, and after
--tries it counts nevertheless. --stop NAME keeps a server, which then needs a PID, stopped in others' turns:
one that computes even when nobody asks it.
--memory-gb-per-s and --gflop-per-s (`python -m benchmarks.cpu.machine`) add each figure's share of the
machine's floor.
Run: python -m benchmarks.cpu.compare --model MODEL_DIR --runs runs.jsonl --plot comparison.png \
         carousel=carousel@http://127.0.0.1:30000#PID vllm=vllm@http://127.0.0.1:8000#PID
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.cpu.floor import Machine, ModelShape
from benchmarks.cpu.report import best_tries, draw, print_report, summarize
from benchmarks.cpu.runs import (
    Server,
    all_turns,
    read_runs,
    run_and_note,
    seed_of,
    stopped_between_turns,
    turns_left,
)
from benchmarks.cpu.workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", type=Server.parse, metavar="NAME=BACKEND@URL[#PID]")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model that all serve")
    parser.add_argument("--runs", type=Path, required=True, help="file of JSON lines; what it has is kept")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of the warm-up, and one that these servers have not had; each round has the next one",
    )
    parser.add_argument("--time-limit-s", type=float, default=float("inf"), help="begin no run after it")
    parser.add_argument("--max-others", type=float, default=0.1, help="cores; beyond them a run is disturbed")
    parser.add_argument("--tries", type=int, default=3, help="to make an undisturbed run")
    parser.add_argument(
        "--stop", nargs="*", default=[], metavar="NAME", help="SIGSTOP these in others' turns"
    )
    parser.add_argument("--memory-gb-per-s", type=float, help="what the machine reads")
    parser.add_argument("--gflop-per-s", type=float, help="what it computes in bf16")
    parser.add_argument("--plot", type=Path, help="PNG to write (needs matplotlib)")
    args = parser.parse_args()
    stopped = [server for server in args.servers if server.name in args.stop]
    if len(stopped) < len(args.stop) or any(server.pid is None for server in stopped):
        parser.error("--stop takes names of servers with a PID")
    workloads = args.workloads.split(",")
    deadline = time.monotonic() + args.time_limit_s
    while left := turns_left(
        all_turns(args.rounds, workloads, args.servers),
        runs := read_runs(args.runs),
        args.max_others,
        args.tries,
    ):
        if time.monotonic() > deadline:
            print(f"{len(left)} runs are left: give the same command again")
            break
        with stopped_between_turns(stopped, left[0].server):
            run_and_note(left[0], args.model, seed_of(left[0], runs, args.seed), args.runs)
    machine = None
    if args.memory_gb_per_s and args.gflop_per_s:
        machine = Machine(args.memory_gb_per_s, args.gflop_per_s)
    names = [server.name for server in args.servers]
    report = summarize(
        best_tries(read_runs(args.runs)), workloads, names, ModelShape.read(args.model), machine
    )
    print_report(report)
    if args.plot is not None:
        draw(report, names, args.plot)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
