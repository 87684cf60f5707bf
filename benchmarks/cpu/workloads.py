"""The four workloads by which servers are compared, as flags of bench_serving. Knows no server."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from benchmarks.cpu.floor import Floor, Machine, ModelShape


class Workload(NamedTuple):
    what: str
    flags: tuple[str, ...]
    figures: tuple[str, ...]
    """Figures of bench_serving's results that are compared."""
    floor: Floor | None
    """Lower bound of the time, if the machine and not the arrivals set the limit."""
    repeats: str | None = None
    """Workload whose prompts are repeated; None: it has its own."""


def _random(num: int, input_len: int, output_len: int, *more: str) -> tuple[str, ...]:
    return (
        *("--dataset-name", "random-ids", "--random-range-ratio", "1", "--num-prompts", str(num)),
        *("--random-input-len", str(input_len), "--random-output-len", str(output_len), *more),
    )


def _all_at_once_floor(num: int, input_len: int, output_len: int) -> Floor:
    def floor(model: ModelShape, machine: Machine) -> dict[str, float]:
        seconds = model.prefill_s(machine, num, input_len) + sum(
            model.step_s(machine, num, input_len + done) for done in range(1, output_len)
        )
        return {"duration": seconds, "output_throughput": num * output_len / seconds}

    return floor


def _single_stream_floor(model: ModelShape, machine: Machine) -> dict[str, float]:
    return {
        "mean_ttft_ms": 1e3 * model.prefill_s(machine, 1, 512),
        "mean_tpot_ms": 1e3 * model.step_s(machine, 1, 512 + 128 // 2),
    }


def _shared_prefix_floor(model: ModelShape, machine: Machine) -> dict[str, float]:
    """Return the lower bound: the prefix once, then the rest of each prompt."""
    rest_s = model.prefill_s(machine, 1, 1056) - model.prefill_s(machine, 1, 1024)
    steps_s = sum(model.step_s(machine, 32, 1056 + done) for done in range(1, 16))
    return {"duration": model.prefill_s(machine, 1, 1024) + 32 * rest_s + steps_s}


Workloads: TypeAlias = dict[str, Workload]
LATENCIES = ("median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms")

SHARED_PREFIX = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "1"),
    *("--gsp-prompts-per-group", "32", "--gsp-system-prompt-len", "1024"),
    *("--gsp-question-len", "32", "--gsp-output-len", "16"),
)

WORKLOADS: Workloads = {
    "w1": Workload(
        "throughput: 64 x (128 -> 128) at once",
        _random(64, 128, 128),
        ("output_throughput", "duration"),
        _all_at_once_floor(64, 128, 128),
    ),
    "w1-small": Workload(
        "throughput of a larger model: 16 x (128 -> 64) at once",
        _random(16, 128, 64),
        ("output_throughput", "duration"),
        _all_at_once_floor(16, 128, 64),
    ),
    "w2": Workload(
        "one stream: 512 -> 128",
        _random(6, 512, 128, "--max-concurrency", "1"),
        ("mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms"),
        _single_stream_floor,
    ),
    "w2-short": Workload(
        "one stream of a larger model: two of 512 -> 128",
        _random(2, 512, 128, "--max-concurrency", "1"),
        ("mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms"),
        _single_stream_floor,
    ),
    **{
        f"w3-{rate}": Workload(
            f"online: 64 x (256 -> 64), {rate} requests/s",
            _random(64, 256, 64, "--request-rate", rate),
            (*LATENCIES, "output_throughput"),
            _all_at_once_floor(64, 256, 64) if rate == "inf" else None,
        )
        for rate in ("2", "8", "16", "inf")
    },
    "w4": Workload(
        "shared prefix: 32 x (1,024 shared + 32 -> 16) at once",
        SHARED_PREFIX,
        ("duration", "mean_ttft_ms"),
        _shared_prefix_floor,
    ),
    "w4-warm": Workload(
        "the same prompts once more, as they follow w4 in a round",
        SHARED_PREFIX,
        ("duration", "mean_ttft_ms"),
        None,
        repeats="w4",
    ),
    "w4-apart": Workload(
        "the same without a shared prefix: 32 x (1,056 -> 16)",
        _random(32, 1056, 16),
        ("duration", "mean_ttft_ms"),
        _all_at_once_floor(32, 1056, 16),
    ),
}
