"""64 prompts of 128 tokens to 128 new ones each through the Python interface of each engine, in turns.

An engine is NAME=COMMAND: carousel or vllm, and what starts its Python, for instance vllm="env LD_PRELOAD=LIB
/path/to/python". Each has a process of its own for all rounds, of which the first warms up, and sleeps while
the other works; --stop NAME stops one that computes even then. Prompts are drawn from the ids in
MODEL_DIR/safe_token_ids.json, or else from all.
Run: python -m benchmarks.cpu.offline --model MODEL_DIR carousel=.venv/bin/python vllm=/path/to/python
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.process_cpu import machine_busy, tree_cpu, tree_pids

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 64, 128, 128
READY, DONE = "ready", "done:"
Prompts = list[list[int]]


def carousel_engine(model: str) -> Callable[[Prompts], int]:
    from carousel import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", context_length=2048, max_running_requests=NUM_PROMPTS)
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)

    def generate(prompts: Prompts) -> int:
        completions = llm.generate(prompts, params, use_tqdm=False)
        assert isinstance(completions, list)
        return sum(len(completion.token_ids) for completion in completions)

    return generate


def vllm_engine(model: str) -> Callable[[Prompts], int]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="bfloat16", max_model_len=2048, max_num_seqs=NUM_PROMPTS, enable_prefix_caching=True
    )
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)

    def generate(prompts: Prompts) -> int:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


ENGINES = {"carousel": carousel_engine, "vllm": vllm_engine}


def vocabulary_of(model: Path) -> Sequence[int]:
    """Return the ids that prompts are drawn from: those in safe_token_ids.json, or else all."""
    ids = model / "safe_token_ids.json"
    vocabulary: Sequence[int] = json.loads(ids.read_text() if ids.exists() else "[]")
    return vocabulary or range(json.loads((model / "config.json").read_text())["vocab_size"])


def engine_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Return a parser for comparisons of engines: the engines, the model, and the number of rounds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", type=lambda text: text.partition("="), metavar="NAME=COMMAND")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--stop", choices=ENGINES, nargs="*", default=[], help="SIGSTOP these in others' turns"
    )
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    return parser


def serve(name: str, model: Path) -> None:
    """Answer turns: a line in is a round's number, a line out its tokens and seconds."""
    vocabulary, generate = vocabulary_of(model), ENGINES[name](str(model))
    print(READY, flush=True)
    for line in sys.stdin:
        draw = random.Random(line)
        prompts = [draw.choices(vocabulary, k=INPUT_LEN) for _ in range(NUM_PROMPTS)]
        began = time.perf_counter()
        num_tokens = generate(prompts)
        print(DONE, num_tokens, time.perf_counter() - began, flush=True)


class Engine:
    def __init__(self, name: str, command: list[str], *, is_stopped_between: bool) -> None:
        """Start `command`, which prints READY and then answers each line with DONE, tokens and seconds.
        is_stopped_between: its processes are stopped by SIGSTOP except in its own turns.
        """
        self.name = name
        self._is_stopped_between = is_stopped_between
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line_after(READY)
        self._signal(signal.SIGSTOP)

    def run(self, turn: str, num_tokens: int = NUM_PROMPTS * OUTPUT_LEN) -> dict[str, float]:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        began, busy, own = time.monotonic(), machine_busy(), tree_cpu(self.process.pid)
        print(turn, file=self.process.stdin, flush=True)
        num_made, seconds = map(float, self._line_after(DONE).split()[1:])
        assert num_made == num_tokens
        cpu_s = tree_cpu(self.process.pid) - own
        others_s = machine_busy() - busy - cpu_s
        others_cores = max(0.0, others_s / (time.monotonic() - began))
        self._signal(signal.SIGSTOP)
        return {"tokens_per_s": num_tokens / seconds, "cpu_s": cpu_s, "others_cores": others_cores}

    def _line_after(self, start: str) -> str:
        """Return the next line with this prefix. Engines also print other lines."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes, if it is an engine that is stopped between turns."""
        if self._is_stopped_between:
            for pid in tree_pids(self.process.pid):
                os.kill(pid, number)

    def close(self) -> None:
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = engine_parser(__doc__, rounds=5)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model)
        return
    engines = [
        Engine(
            name,
            [
                *shlex.split(command),
                "-m",
                "benchmarks.cpu.offline",
                "--serve",
                name,
                "--model",
                str(args.model),
            ],
            is_stopped_between=name in args.stop,
        )
        for name, _, command in args.engines
    ]
    runs = [{engine.name: engine.run(str(number)) for engine in engines} for number in range(args.rounds + 1)]
    del runs[0]
    for engine in engines:
        engine.close()
        for figure in ("tokens_per_s", "cpu_s", "others_cores"):
            values = [run[engine.name][figure] for run in runs]
            print(
                f"{engine.name:<10} {figure:<13} {statistics.median(values):10.2f}  "
                f"[{min(values):.2f} - {max(values):.2f}]"
            )
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
