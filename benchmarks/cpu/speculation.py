"""Output tokens a second with guesses of a known quality, against none, in turns in one run.

    python -m benchmarks.cpu.speculation [--model qwen-0.5b] [--streams 1,8,64] [--wrong 0,0.2,1]
                                          [--guesses 4] [--tokens 64] [--context 256] [--rounds 3]
    python -m benchmarks.cpu.speculation --model demo --ngrams [--text] [--temperature 0]
    python -m benchmarks.cpu.speculation --streams 8 --wrong 0 --beside

The model has random weights. What a run without guesses gives is kept, and later runs guess it, with a seeded
share of the positions wrong; n-grams are looked up, too, as a request's would be. With --ngrams they are what
is guessed, behind a prompt of Python code, with --text behind random tokens, so that nothing repeats but what
the model does. With --beside the first stream does not guess, and `gap` is the ratio of the time between its
tokens, the median, to that of the run without guesses. All else is what serves: scheduler, planning ahead,
adaptive numbers of guesses, worker. Counted from the moment in which every stream has its first token. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from benchmarks.bench_cpu_step import SHAPES
from model_worker.device import make_device
from model_worker.executors.inproc import InprocExecutor
from model_worker.load_worker import load_worker
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.text import tokenizer
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.handle import HANDLE_BYTES, make_handle
from runtime.wire.messages import StreamOpen, TokenBatch, TokenizedRequest
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.transport import MemoryChannel
from scheduler_proc.build_scheduler import build_scheduler
from scheduler_proc.core.request import Request
from scheduler_proc.features.speculation import speculation
from scheduler_proc.features.speculation.step_cost import StepCost
from scheduler_proc.port import Port
from scheduler_proc.scheduler import Scheduler

PLAIN = "none"
CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"


class Recorded(speculation.Speculation):
    """Speculation that guesses the output of an earlier run without guesses, instead of n-gram matches."""

    outputs: ClassVar[dict[int, list[int]]] = {}
    """Outputs by the request's seed."""
    wrong: ClassVar[float] = 0.0

    def __init__(self, req: Request, num_draft_tokens: int, cost: StepCost, guesser: object = None) -> None:
        # Without the guesser of many rows, which supports n-grams only.
        super().__init__(req, num_draft_tokens, cost)

    def _has_guesses(self, new: list[int]) -> bool:
        super()._has_guesses(new)
        return self._num_drafts() > 0

    def _guesses(self, room: int) -> Sequence[int]:
        super()._guesses(room)
        seed, at = self._req.sampling.seed, self._req.num_output
        assert seed is not None
        true = self.outputs[seed][at : at + min(room, self._num_drafts())]
        draws = [random.Random(seed << 20 | at + i).random() for i in range(len(true))]
        return [token ^ (draw < self.wrong) for token, draw in zip(true, draws, strict=True)]


class Run(NamedTuple):
    tokens_per_s: float
    outputs: dict[int, list[int]]
    """Outputs by seed."""
    gap_s: float
    """Median time between two tokens of the first stream."""


class Streams:
    """A scheduler and its worker, for requests that all begin together."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        rows = max(options.streams)
        model = DEMO_MODEL
        if options.model != "demo":
            (folder / "config.json").write_text(json.dumps(SHAPES[options.model]))
            model = folder
        length = options.context + options.tokens
        config = RuntimeConfig(
            model=str(model),
            load_format="auto" if options.model == "demo" else "dummy",
            device="cpu",
            dtype="bfloat16",
            context_length=length + 1,
            max_running_requests=rows,
            max_total_tokens=rows * (length + 16),
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=options.guesses,
            disable_radix_cache=True,
            log_level="error",
        )
        worker = load_worker(config, make_device("cpu", threaded=True), lambda: None)
        self._executor = InprocExecutor(worker, max_in_flight=2)
        self._output = MemoryChannel("detokenizer_in")
        port = Port(MemoryChannel("scheduler_in"), [self._output])
        self.scheduler: Scheduler = build_scheduler(config, frozenset(), self._executor, worker.limits, port)
        self._options = options
        self._vocab = worker.limits.vocab_size
        self._number = 0
        self._code = tokenizer.load(DEMO_MODEL).encode_batch([CODE], add_special_tokens=False)[0]

    def run(self, num_streams: int, *, guesses: bool) -> Run:
        """Serve num_streams requests that begin together."""
        seeds: dict[bytes, int] = {}
        inbox = []
        for seed in range(num_streams):
            self._number += 1
            handle = make_handle(1, self._number)
            seeds[handle] = seed
            may_guess = guesses and not (self._options.beside and not seed)
            inbox.append(self._request(handle, seed, guesses=may_guess))
        outputs: dict[int, list[int]] = {seed: [] for seed in range(num_streams)}
        began, num_before = 0.0, 0
        times: list[float] = []
        while not self.scheduler.is_idle or inbox:
            self.scheduler.step(inbox)
            inbox = []
            for message in self._output.drain():
                if isinstance(message, TokenBatch):
                    for i, token in enumerate(unpack_ids(message.tokens).tolist()):
                        outputs[seeds[message.handles[i * HANDLE_BYTES : (i + 1) * HANDLE_BYTES]]].append(
                            token
                        )
            if not began and all(outputs.values()):
                began, num_before = time.perf_counter(), sum(map(len, outputs.values()))
            if began and len(outputs[0]) > len(times):
                times += [time.perf_counter()] * (len(outputs[0]) - len(times))
        num_tokens = sum(map(len, outputs.values())) - num_before
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return Run(num_tokens / (time.perf_counter() - began), outputs, statistics.median(gaps))

    def _request(self, handle: bytes, seed: int, *, guesses: bool) -> TokenizedRequest:
        options = self._options
        ids = np.random.default_rng(seed).integers(8, self._vocab, options.context, dtype=np.int32)
        if options.ngrams and not options.text:
            ids[:] = np.resize(self._code, options.context)
        sampling = SamplingParams(
            max_tokens=options.tokens,
            seed=seed,
            temperature=options.temperature,
            ignore_eos=True,
            speculative_num_draft_tokens=None if guesses else 0,
        )
        opened = msgspec.Raw(msgspec.msgpack.encode(StreamOpen(handle, options.context)))
        return TokenizedRequest(handle, pack_ids(ids), sampling, opened)

    def close(self) -> None:
        self._executor.close()


def compare(streams: Streams, num_streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run with each share of wrong guesses and without guesses, in turns."""
    Recorded.outputs = streams.run(num_streams, guesses=False).outputs
    runs: dict[str, list[Run]] = {}
    results: dict[str, Any] = {}
    for turn in range(options.rounds + 1):
        for wrong in (None, *options.wrong):
            name = PLAIN if wrong is None else str(wrong)
            Recorded.wrong = wrong or 0.0
            before = streams.scheduler.stats.drafts.totals()
            run = streams.run(num_streams, guesses=wrong is not None)
            after = streams.scheduler.stats.drafts.totals()
            if not turn:  # the costs of steps are not known yet
                continue
            runs.setdefault(name, []).append(run)
            counts = results.setdefault(name, {"drafted": 0, "accepted": 0, "other_outputs": 0})
            for key, total in (("drafted", "num_draft_tokens"), ("accepted", "num_accepted_draft_tokens")):
                counts[key] += int(after[total]) - int(before[total])  # type: ignore[arg-type]
            counts["other_outputs"] += sum(
                run.outputs[seed] != Recorded.outputs[seed] for seed in run.outputs
            )
    for name, each in runs.items():
        pairs = list(zip(each, runs[PLAIN], strict=True))
        ratio = statistics.median(run.tokens_per_s / plain.tokens_per_s for run, plain in pairs)
        rate = statistics.median(run.tokens_per_s for run in each)
        results[name] |= {"tokens_per_s": round(rate, 1), "ratio": round(ratio, 3)}
        if options.beside:
            gap = statistics.median(run.gap_s / plain.gap_s for run, plain in pairs)
            results[name]["gap"] = round(gap, 3)
        print(f"{num_streams:3d} streams, wrong {name:>4}: {results[name]}", flush=True)
    return results


def main() -> None:
    options = _parse()
    gc.disable()
    if options.ngrams:
        options.wrong = [0.0]
    else:
        speculation.Speculation = Recorded  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        streams = Streams(options, Path(folder))
        report = {str(n): compare(streams, n, options) for n in options.streams}
        streams.close()
    print(json.dumps({"model": options.model, "guesses": options.guesses, "streams": report}))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="qwen-0.5b", choices=["demo", *SHAPES])
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--wrong", type=lambda text: [float(n) for n in text.split(",")], default=[0, 0.2, 1])
    parser.add_argument("--ngrams", action="store_true")
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
