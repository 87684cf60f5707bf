"""Report of a comparison's runs: medians, ratios, and shares of the lower bound, as text and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.floor import Machine, ModelShape
from benchmarks.cpu.runs import WARM_UP
from benchmarks.cpu.workloads import WORKLOADS

MORE_IS_BETTER = "output_throughput"
OF_THE_RUN = ("pss_mib", "cpu_s", "others_cores")
"""Figures that every run has, besides those of its workload."""


def share_of_floor(figure: str, value: float, floor: float) -> float:
    return value / floor if figure == MORE_IS_BETTER else floor / value


def best_tries(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each turn the try with the least disturbance by other processes."""
    best: dict[tuple[int, str, str], dict[str, Any]] = {}
    for run in runs:
        key = (run["round"], run["workload"], run["server"])
        if key not in best or run["others_cores"] < best[key]["others_cores"]:
            best[key] = run
    return list(best.values())


def summarize(
    runs: Sequence[dict[str, Any]],
    workloads: Sequence[str],
    servers: Sequence[str],
    model: ModelShape,
    machine: Machine | None,
) -> dict[str, Any]:
    """Return {workload: {figure: {server: {median, range, runs, ratio, of_floor}}}} of the rounds that count.
    A ratio is the first server's median divided by this one's.
    """
    report: dict[str, Any] = {}
    for name in workloads:
        floor_of = WORKLOADS[name].floor
        floor = {} if machine is None or floor_of is None else floor_of(model, machine)
        figures = report[name] = {}
        for figure in (*WORKLOADS[name].figures, *OF_THE_RUN):
            by_server: dict[str, Any] = {}
            for server in servers:
                values = [
                    run[figure] if figure in OF_THE_RUN else run["figures"][figure]
                    for run in runs
                    if (run["workload"], run["server"]) == (name, server)
                    and run["round"] > WARM_UP
                    and (figure not in OF_THE_RUN or figure in run)
                ]
                if not values:
                    continue
                median = statistics.median(values)
                found = {"median": median, "range": [min(values), max(values)], "runs": len(values)}
                if median and (servers[0] in by_server or server == servers[0]):
                    found["ratio"] = by_server.get(servers[0], found)["median"] / median
                if figure in floor:
                    found["of_floor"] = share_of_floor(figure, median, floor[figure])
                by_server[server] = found
            if by_server:
                figures[figure] = by_server
    return report


def print_report(report: dict[str, Any]) -> None:
    for name, figures in report.items():
        print(f"{name}, {WORKLOADS[name].what}")
        for figure, by_server in figures.items():
            for server, found in by_server.items():
                low, high = found["range"]
                ratio = f"first / this {found['ratio']:5.2f}" if "ratio" in found else ""
                floor = f"{found['of_floor']:6.0%} of the floor" if "of_floor" in found else ""
                print(
                    f"  {figure:<18} {server:<12} {found['median']:10.2f}  [{low:.2f} - {high:.2f}]  "
                    f"{found['runs']} runs  {ratio} {floor}"
                )


def draw(report: dict[str, Any], servers: Sequence[str], path: Path) -> None:
    """Draw a panel for each workload's first two figures, with a bar for each server's median and a line for
    its range. Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure

    panels = [(name, figure) for name in report for figure in list(report[name])[:2]]
    columns = 4
    rows = -(-len(panels) // columns)
    picture = Figure(figsize=(4 * columns, 2.6 * rows), layout="constrained")
    for number, (name, figure) in enumerate(panels):
        axes = picture.add_subplot(rows, columns, number + 1)
        by_server = report[name][figure]
        shown = [server for server in servers if server in by_server]
        medians = [by_server[server]["median"] for server in shown]
        below = [by_server[s]["median"] - by_server[s]["range"][0] for s in shown]
        above = [by_server[s]["range"][1] - by_server[s]["median"] for s in shown]
        colours = [f"C{servers.index(server)}" for server in shown]
        axes.bar(shown, medians, yerr=(below, above), color=colours, capsize=3)
        axes.set_title(f"{name}: {figure}", fontsize=9)
        axes.tick_params(labelsize=8)
    picture.savefig(path, dpi=120)
