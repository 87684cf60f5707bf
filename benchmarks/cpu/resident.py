"""Resident memory of a worker that has loaded a model, on each instruction set and with each kind of weights.

    python -m benchmarks.cpu.resident --model MODEL_DIR [--isas avx2,portable] [--max-total-tokens 8192]

A launch for each, one after the other. Beside what the kernel counts stand the weights, as they are computed
with, and the KV cache, and the share of what they may take: 1.05 times the weights, the cache, and 200 MB for
Python, its libraries and what steps compute with. Needs no quiet machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from math import prod
from pathlib import Path

from safetensors import safe_open

from benchmarks.cpu.floor import ModelShape
from benchmarks.process_cpu import children_of, role_of
from benchmarks.server import launched
from runtime.base.cpu_isa import usable_isas

KINDS = {"bfloat16": 2, "float32": 4, "int8": 1}
"""Kinds of weights, with the bytes of each number."""
MOST_OF_WEIGHTS = 1.05
OWN_BYTES = 200_000_000


def weight_bytes(model: Path, kind: str) -> int:
    """Return the bytes of all weights. For int8 these are the matrices with their scales."""
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- a file is no mapping
                shape = file.get_slice(name).get_shape()
                is_table = name.endswith("embed_tokens.weight")
                if kind == "int8" and len(shape) == 2 and not is_table:
                    total += prod(shape) + 4 * shape[0]
                else:
                    total += prod(shape) * max(2, KINDS[kind])
    return total


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def measure(model: Path, isa: str, kind: str, max_total_tokens: int) -> dict[str, float]:
    arguments = (
        *("--model", str(model), "--device", "cpu", "--cpu-isa", isa, "--context-length", "2048"),
        *("--max-running-requests", "8", "--max-total-tokens", str(max_total_tokens)),
        *(("--quantization", "int8") if kind == "int8" else ("--dtype", kind)),
    )
    with launched(*arguments) as server:
        pids = children_of(server.launcher_pid)
        (worker,) = (pid for pid in pids if role_of(pid) == "worker")
        resident = resident_bytes(worker)
    shape = ModelShape.read(model)
    weights, element_bytes = weight_bytes(model, kind), max(2, KINDS[kind])
    kv = max_total_tokens * shape.num_hidden_layers * 2 * shape.key_value_size * element_bytes
    most = MOST_OF_WEIGHTS * weights + kv + OWN_BYTES
    return {"resident": resident, "weights": weights, "kv": kv, "share": round(resident / most, 3)}


def main() -> None:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--isas", type=names, default=list(usable_isas()))
    parser.add_argument("--kinds", type=names, default=list(KINDS))
    parser.add_argument("--max-total-tokens", type=int, default=8192, help="of the KV cache")
    args = parser.parse_args()
    results = {}
    for isa in args.isas:
        for kind in args.kinds:
            found = results[f"{isa} {kind}"] = measure(args.model, isa, kind, args.max_total_tokens)
            megabytes = {name: round(found[name] / 1e6) for name in ("resident", "weights", "kv")}
            shown = ", ".join(f"{name} {size} MB" for name, size in megabytes.items())
            print(f"{isa:>12} {kind:<9} {shown}: {found['share']:.0%} of what it may be", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
