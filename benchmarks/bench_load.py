"""Host memory and time that a rank needs to load its part of a sharded checkpoint.

    python -m benchmarks.bench_load --gib 2 --tp 2

Makes a checkpoint in shards with an index in a temporary directory, and loads each rank's part as bfloat16 in
a process of its own, all at once. Peak: the most resident memory since before the load, mapped file pages
included, less what was resident then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from model_worker.distributed.group import SoloGroup
from model_worker.loading.loader import load_model
from model_worker.loading.tensor_names import checkpoint_targets
from model_worker.models.llama import SPEC
from model_worker.models.parts import Parts
from model_worker.models.transformer import CausalLM
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.weight_files import INDEX_FILE

NUM_SHARDS = 4


class Place(SoloGroup):
    """Group with a rank and a size. Loading needs nothing else of it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def make_checkpoint(folder: Path, gib: float, dtype: torch.dtype) -> None:
    """Make a Llama checkpoint with 2048 channels and as many layers as fill `gib` in bfloat16; the files have
    `dtype`.
    """
    hidden, inner, vocab_size = 2048, 5632, 32000
    layer_bytes = 2 * (2 * hidden * hidden + 2 * hidden * 256 + 3 * hidden * inner)
    num_layers = max(1, round((gib * (1 << 30) - 4 * vocab_size * hidden) / layer_bytes))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    empty = CausalLM(Parts(ModelConfig.from_path(folder), SPEC, torch.bfloat16, "meta"))
    shapes = {name: pieces[0].shape for name, pieces in checkpoint_targets(empty).items()}
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_SHARDS)]
    files: dict[str, str] = {}
    for n, name in enumerate(sorted(shapes)):
        shard = n * NUM_SHARDS // len(shapes)
        shards[shard][name] = torch.zeros(shapes[name], dtype=dtype)
        files[name] = f"model-{shard}.safetensors"
    for shard, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{shard}.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def measure(folder: Path, rank: int, size: int) -> dict[str, float]:
    config = ModelConfig.from_path(folder)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    began = time.perf_counter()
    model = load_model(folder, config, torch.bfloat16, "cpu", group=Place(rank, size))
    seconds = time.perf_counter() - began
    weights = sum(weight.nbytes for weight in model.parameters())
    peak = _status("VmHWM") - before
    return {"rank": rank, "weights_mib": weights >> 20, "peak_mib": peak >> 20, "seconds": round(seconds, 2)}


def _status(name: str) -> int:
    """Return the bytes in a kB line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def run(gib: float, size: int, dtype: torch.dtype) -> list[dict[str, float]]:
    """Return what each rank measured with files of `dtype`."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as folder:
        make_checkpoint(Path(folder), gib, dtype)
        command = [sys.executable, "-m", "benchmarks.bench_load", "--tp", str(size), "--folder", folder]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    return [json.loads(output) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the weights in bfloat16")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="in the files"
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--folder", help="of one rank: the checkpoint")
    parser.add_argument("--rank", type=int, help="of one rank: which")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(Path(arguments.folder), arguments.rank, arguments.tp)))
        return
    for result in run(arguments.gib, arguments.tp, getattr(torch, arguments.dtype)):
        ratio = result["peak_mib"] / result["weights_mib"]
        print(
            f"rank {result['rank']}: weights {result['weights_mib']} MiB, peak {result['peak_mib']} MiB "
            f"({ratio:.3f}), {result['seconds']} s"
        )


if __name__ == "__main__":
    main()
