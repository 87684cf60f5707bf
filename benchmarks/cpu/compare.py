"""The same workloads against several servers of the same model, with the same client, in turns.

In each round every server gets the same prompts at the same times; one server under two names would find
them in its cache. The first server is what the others are divided by. --memory-gb-per-s and --gflop-per-s add
each figure's share of the machine's floor.
Run: python -m benchmarks.cpu.compare --model MODEL_DIR carousel=carousel@http://127.0.0.1:30000 \
         vllm=vllm@http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cpu.floor import Machine, ModelShape
from benchmarks.cpu.workloads import WORKLOADS, Workload

MORE_IS_BETTER = "output_throughput"


class Server(NamedTuple):
    name: str
    backend: str
    url: str

    @staticmethod
    def parse(text: str) -> Server:
        name, _, rest = text.partition("=")
        backend, _, url = rest.partition("@")
        if not (name and backend and url):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=BACKEND@URL")
        return Server(name, backend, url)


def measure(server: Server, workload: Workload, model: Path, seed: int) -> dict[str, Any]:
    """The results of one run. Raises RuntimeError when a request failed."""
    command = [
        *(sys.executable, "-m", "bench_serving", "--backend", server.backend, "--base-url", server.url),
        *("--tokenizer", str(model), "--seed", str(seed), "--disable-tqdm", *workload.flags),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{server.name}: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def share_of_floor(figure: str, value: float, floor: float) -> float:
    return value / floor if figure == MORE_IS_BETTER else floor / value


def compare(args: argparse.Namespace, workload: Workload, floor: dict[str, float]) -> dict[str, Any]:
    """{figure: {server: {median, range, ratio, of_floor}}}, printed as well."""
    runs: dict[str, list[dict[str, Any]]] = {server.name: [] for server in args.servers}
    for number in range(args.rounds):
        for server in args.servers:
            runs[server.name].append(measure(server, workload, args.model, args.seed + number))
    report: dict[str, Any] = {}
    for figure in workload.figures:
        report[figure] = {}
        for server in args.servers:
            values = [run[figure] for run in runs[server.name]]
            median = statistics.median(values)
            found = {"median": median, "range": [min(values), max(values)]}
            found["ratio"] = median / report[figure].get(args.servers[0].name, found)["median"]
            if figure in floor:
                found["of_floor"] = share_of_floor(figure, median, floor[figure])
            report[figure][server.name] = found
            shown = f"{found['of_floor']:6.0%} of the floor" if figure in floor else ""
            print(
                f"  {figure:<18} {server.name:<12} {median:10.2f}  [{min(values):.2f} - {max(values):.2f}]  "
                f"x {found['ratio']:.2f} {shown}"
            )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", nargs="+", type=Server.parse, metavar="NAME=BACKEND@URL")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model that all serve")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; another one, other prompts")
    parser.add_argument("--memory-gb-per-s", type=float, help="what the machine reads")
    parser.add_argument("--gflop-per-s", type=float, help="what it computes in bf16")
    args = parser.parse_args()
    machine = None
    if args.memory_gb_per_s and args.gflop_per_s:
        machine = Machine(args.memory_gb_per_s, args.gflop_per_s)
    report: dict[str, Any] = {}
    for name in args.workloads.split(","):
        workload = WORKLOADS[name]
        print(f"{name}, {workload.what}")
        floor: dict[str, float] = {}
        if machine is not None and workload.floor is not None:
            floor = workload.floor(ModelShape.read(args.model), machine)
            print("  floor: " + ", ".join(f"{figure} {value:.2f}" for figure, value in floor.items()))
        report[name] = {"floor": floor, "figures": compare(args, workload, floor)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
