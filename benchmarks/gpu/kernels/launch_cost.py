"""Host time of one launch of each kernel: as a server launches it, and by Triton alone.

    python -m benchmarks.gpu.kernels.launch_cost                        every call; on a GPU if there is one
    python -m benchmarks.gpu.kernels.launch_cost --call "add and norm"  one
    python -m benchmarks.gpu.kernels.launch_cost --json

Without a GPU kernels are compiled for Hopper and launched through a driver that does nothing, so the time is
Python's alone. A call is what a layer calls: its views, its empty tensors and its launches, some of them
torch's, which without a GPU compute on one thread of the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from benchmarks.gpu.fake_driver import NAME, fake_driver
from benchmarks.gpu.kernels.launch_calls import LAYERS, LLAMA_8B, Calls, launch_calls
from benchmarks.gpu.kernels.launches import count_launches
from benchmarks.gpu.timing import wait
from model_worker.device import make_device
from model_worker.device.base import Device
from model_worker.kernels.triton.call_site import launches_by_triton_alone

CALLS = 10
"""Calls in one batch: few enough that another process seldom interferes, and a device's queue is never full.
"""
BATCHES = 150


def launch_costs(device: Device, calls: Calls, *, num_calls: int, num_batches: int) -> list[dict[str, Any]]:
    """Return the launches of each call in order, and its host time in microseconds, as a server launches
    (`us`) and with Triton's binder and cache key (`us_by_triton`): the mean of the best batch.
    """
    results = []
    for name, run in calls.items():
        with count_launches() as launches:
            run()
        us, us_by_triton = _best_us(run, device, num_calls, num_batches)
        results.append({"call": name, "launches": launches.names, "us": us, "us_by_triton": us_by_triton})
    return results


def of_layers(costs: list[dict[str, Any]], which: str = "us") -> dict[str, float]:
    """Return the microseconds of all launches of a layer, without the matrix products."""
    us = {each["call"]: each[which] for each in costs}
    return {
        layer: sum(times * us[call] for call, times in calls.items())
        for layer, calls in LAYERS.items()
        if calls.keys() <= us.keys()
    }


def _best_us(
    run: Callable[[], object], device: Device, num_calls: int, num_batches: int
) -> tuple[float, float]:
    """Time launches as a server makes them, and by Triton alone, in alternating batches, so that both run
    under the same conditions.
    """
    best_s = [float("inf"), float("inf")]
    run()  # compiles
    run()  # keeps the compiled code
    for _ in range(num_batches):
        for i, by_triton in enumerate((False, True)):
            wait(device.torch_device)
            with launches_by_triton_alone() if by_triton else nullcontext():
                began_s = time.perf_counter()
                for _ in range(num_calls):
                    run()
                best_s[i] = min(best_s[i], (time.perf_counter() - began_s) / num_calls)
    wait(device.torch_device)
    return 1e6 * best_s[0], 1e6 * best_s[1]


@contextmanager
def _device() -> Iterator[tuple[Device, str]]:
    """Context manager for a GPU and its name, or for the fake driver's."""
    if torch.cuda.is_available():
        yield make_device("cuda", threaded=False), torch.cuda.get_device_name()
        return
    torch.set_num_threads(1)
    with fake_driver():
        yield make_device("cpu", threaded=False), NAME


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--call", action="append", help="default: all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    with _device() as (device, name), torch.inference_mode():
        calls = launch_calls(device, torch.bfloat16, LLAMA_8B)
        if unknown := set(arguments.call or ()) - calls.keys():
            parser.error(f"--call: no {', '.join(sorted(unknown))}; there are {', '.join(calls)}")
        chosen = {call: run for call, run in calls.items() if not arguments.call or call in arguments.call}
        costs = launch_costs(device, chosen, num_calls=CALLS, num_batches=BATCHES)
    layers, layers_by_triton = of_layers(costs), of_layers(costs, "us_by_triton")
    if arguments.json:
        table = {"device": name, "calls": costs, "layers": layers, "layers_by_triton": layers_by_triton}
        print(json.dumps(table))
        return 0
    print(f"device: {name}\n{'us':<32}{'by Triton':>10}{'now':>8}{'ratio':>8}")
    for each in costs:
        _print(each["call"], each["us_by_triton"], each["us"], ", ".join(each["launches"]))
    for layer, us in layers.items():
        _print(layer, layers_by_triton[layer], us, "")
    return 0


def _print(name: str, before: float, after: float, launches: str) -> None:
    print(f"{name:<32}{before:>10.1f}{after:>8.1f}{after / before:>8.2f}   {launches}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
