"""Count what a decode step launches on a GPU, without one.

    python -m benchmarks.gpu.kernels.launches                              # a table: models, batch sizes
    python -m benchmarks.gpu.kernels.launches --list --model qwen3-0.6b    # by name, in order
    python -m benchmarks.gpu.kernels.launches --json                       # for the test that compares
    python -m benchmarks.gpu.kernels.launches --record tests/cpu/triton/compiled/launches.json

What GraphRunner records is run over tensors that have a shape but no memory, so
models have their real size, and the GPU's Ops. A launch is a Triton kernel or a torch operation
that computes or copies; a view is none. A torch operation that is several kernels on a GPU (a sort, a product
that splits its depth) counts as one. Each costs a microsecond or two in a graph, however little it does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from benchmarks.decode_rows import PAGE_SIZE, pages_for
from benchmarks.gpu.shapes import write_config
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.triton import TritonAttention
from model_worker.device.cpu import CpuDevice, Rerun
from model_worker.kernels.fp8_rows import FP8
from model_worker.kernels.triton.call_site import launches_by_triton_alone
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.memory.req_to_token_pool import ReqToTokenPool
from model_worker.models.parts import Parts
from model_worker.models.spec import ModelSpec
from model_worker.models.transformer import CausalLM
from model_worker.ops.base import Ops
from model_worker.ops.triton_ops import TritonOps
from model_worker.quant.selection import select_quant_method
from model_worker.runner.future_map import FutureMap
from model_worker.runner.recording.base import StepParts
from model_worker.runner.recording.selection import record_steps
from model_worker.runner.warm_up import decode_after
from model_worker.sampling.sampler import Sampler
from runtime.base.registry import resolve
from runtime.checkpoint.model_config import ModelConfig
from runtime.wire.plan import BatchPlan

MODELS = ("llama-3.1-8b", "llama-3.1-8b-fp8", "qwen3-0.6b", "gemma-2-2b", "gemma-3-1b", "qwen3-30b-a3b")
BATCHES = (1, 64)
CONTEXT = 4096
H200_MULTIPROCESSORS = 132
GRAPHS = ("forward", "draw", "truncated draw")
"""Recordings in the order in which GraphRunner makes them."""


class CountLaunches(TorchDispatchMode):
    """Context in which launches are recorded in `names`, in order. Triton's kernels do not run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        if _computes(func):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs)

    def launch(self, kernel: Any) -> None:
        self.names.append(kernel.fn.__name__)


def _computes(func: Any) -> bool:
    """Return True if the operation does anything on the device: it is neither a view nor a
    mere allocation.
    """
    if func.overloadpacket.__name__.startswith(("empty", "new_empty", "_unsafe_view", "detach", "lift")):
        return False
    returns = func._schema.returns
    return not any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


@contextmanager
def count_launches() -> Iterator[CountLaunches]:
    counts = CountLaunches()

    def take(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: counts.launch(kernel)

    with launches_by_triton_alone(), mock.patch.object(KernelInterface, "__getitem__", take), counts:
        yield counts


class CountingDevice(CpuDevice):
    """A device that stands for a GPU without having one. graphs: the launches of each recording."""

    name = "cuda"
    torch_device = torch.device("meta")
    prefers_one_pass = True
    compiles_when_launched = True
    has_own_memory = True
    replays_launches = True

    def __init__(self) -> None:
        super().__init__(threaded=False)
        self.graphs: list[list[str]] = []

    def capture(self, fn: Callable[[], None]) -> Rerun:
        with count_launches() as counts:
            fn()
        self.graphs.append(counts.names)
        return Rerun(fn)


class Step:
    """Launches of a decode step by graph, and those of one layer in the middle."""

    def __init__(self, name: str, batch: int) -> None:
        with torch.inference_mode():
            device = CountingDevice()
            ops = TritonOps(TritonAttention(num_multiprocessors=H200_MULTIPROCESSORS))
            model = model_of(name, device, ops)
            marks = _watch(model.model.layers[len(model.model.layers) // 2])
            _record(model, device, ops, batch)
        self.graphs = dict(zip(GRAPHS, device.graphs, strict=True))
        (first, end) = marks
        self.layer = self.graphs["forward"][first:end]

    def counts(self) -> dict[str, int]:
        return {"layer": len(self.layer)} | {graph: len(names) for graph, names in self.graphs.items()}


def _watch(layer: torch.nn.Module) -> list[int]:
    """Return the positions in the list of launches where the layer begins and ends. Valid once it has run."""
    marks: list[int] = []

    def mark(*_: object) -> None:
        (counts,) = (
            mode
            for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            if isinstance(mode, CountLaunches)
        )
        marks.append(len(counts.names))

    layer.register_forward_pre_hook(mark)
    layer.register_forward_hook(mark)
    return marks


def model_of(name: str, device: CountingDevice, ops: Ops, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    """Return the model of that shape, whose weights have no memory."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(name, Path(folder))
        config = ModelConfig.from_path(Path(folder))
    spec = resolve("model architecture", config.spec, {})
    assert isinstance(spec, ModelSpec)
    quant = select_quant_method("auto", config.quantization, device.name)
    model = CausalLM(Parts(config, spec, dtype, device.torch_device, quant=quant))
    model.bind(ops)
    return model


def _record(model: CausalLM, device: CountingDevice, ops: Ops, batch: int) -> None:
    layout, at, vocab_size = model.kv_layout, device.torch_device, model.config.vocab_size
    pool = MHATokenToKVPool(
        batch * pages_for(CONTEXT),
        PAGE_SIZE,
        layout.num_layers,
        layout.num_kv_heads,
        layout.head_dim,
        torch.bfloat16 if model.config.quantization is None else FP8,
        at,
    )
    sampler = Sampler(device, max_rows=batch, max_len=CONTEXT, vocab_size=vocab_size)
    table = ReqToTokenPool(batch, CONTEXT, PAGE_SIZE, device)
    parts = StepParts(
        model=model,
        ops=ops,
        device=device,
        kv_pool=pool,
        table=table,
        future=FutureMap(batch, at),
        sampler=sampler,
        num_ranks=1,
        sizes=[batch],
        max_guesses=0,
        max_len=CONTEXT,
        vocab_size=vocab_size,
        example=decode_after(1),
        lay_out=_no_batch,
    )
    assert record_steps(parts, lambda: None) is not None


def _no_batch(plan: BatchPlan) -> ForwardBatch:
    raise AssertionError("graphs are recorded over a batch of their own")


def _print(name: str, batch: int, step: Step, *, lists: bool) -> None:
    print(f"{name:<16}{batch:>6}" + "".join(f"{count:>16}" for count in step.counts().values()))
    if lists:
        for part, names in {"layer": step.layer, **step.graphs}.items():
            print(f"  {part}: " + ("" if part == "forward" else ", ".join(names)))
            if part == "forward":
                for launch, count in Counter(names).most_common():
                    print(f"{count:>8}  {launch}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--batch", action="append", type=int, help="default: 1 and 64")
    parser.add_argument("--list", action="store_true", help="also the launches by name")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--record", type=Path, help="write this file, which the test compares with")
    arguments = parser.parse_args(argv)
    steps = {
        name: {batch: Step(name, batch) for batch in arguments.batch or BATCHES}
        for name in arguments.model or MODELS
    }
    table = {
        name: {f"batch {batch}": step.counts() for batch, step in by_batch.items()}
        for name, by_batch in steps.items()
    }
    if arguments.record is not None:
        lines = (f" {json.dumps(name)}: {json.dumps(counts)}" for name, counts in table.items())
        arguments.record.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if arguments.json:
        print(json.dumps(table))
        return 0
    print(f"{'launches':<16}{'batch':>6}" + "".join(f"{part:>16}" for part in ("one layer", *GRAPHS)))
    for name, by_batch in steps.items():
        for batch, step in by_batch.items():
            _print(name, batch, step, lists=arguments.list)
    return 0


if __name__ == "__main__":
    sys.exit(main())
