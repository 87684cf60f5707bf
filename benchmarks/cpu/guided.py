"""Cost of guides: to compile, for each mask, in memory, and in the time of a token.

    python -m benchmarks.cpu.guided parts [--vocab 131072]
    python -m benchmarks.cpu.guided tokens [--vocab 131072] [--rows 64] [--rounds 3] [--length 16]
    python -m benchmarks.cpu.guided bombs [--rounds 3]

`parts`: one process, no model: milliseconds to compile, microseconds for a mask and for a token, MB of the
process. `tokens`: a launch with the shape of a 0.5B model and dummy weights; milliseconds between two tokens
of rows inside a JSON string, and of the same rows without a guide, in turns. The tokenizer is the demo
model's with made-up words to that size. `bombs`: the demo model; milliseconds between two tokens of plain
streams over HTTP, alone and while 200 guides that explode are sent at once, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.bench_cpu_step import QWEN
from benchmarks.server import launched
from grammar_proc.compile_child import try_guide
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide
from tests.harness.guides.bombs import bomb

NUM_BOMBS = 200
STRING = {"type": "string", "minLength": 20_000}
EVENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    "required": ["name", "year", "place"],
}
GUIDES = {
    "inside a JSON string": Guide("json_schema", json.dumps(STRING)),
    "object of four fields": Guide("json_schema", json.dumps(EVENT)),
    "any JSON object": Guide("json", ""),
    "regex [a-z ]{1,900}": Guide("regex", "[a-z ]{1,900}"),
    "10,000 choices": Guide("choice", json.dumps([f"choice {number}" for number in range(10_000)])),
}


@contextmanager
def made_model(vocab_size: int) -> Iterator[Path]:
    """Context manager for a directory with config.json and a tokenizer with that many ids,
    without weights.
    """
    tokenizer: Any = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    vocab, rng = tokenizer["model"]["vocab"], random.Random(0)
    while len(vocab) < vocab_size:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgk", k=rng.randrange(2, 9)))
        vocab.setdefault(rng.choice(["Ġ", ""]) + word, len(vocab))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in DEMO_MODEL.iterdir():
            if path.suffix in (".json", ".jinja"):
                shutil.copy(path, folder)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        shape = QWEN | {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0}
        (folder / "config.json").write_text(json.dumps(shape))
        yield folder


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def parts(vocab_size: int) -> None:
    before_mb = resident_mb()
    with made_model(vocab_size) as folder:
        began = time.perf_counter()
        vocabulary = GrammarVocabulary(folder, num_threads=len(os.sched_getaffinity(0)))
        took_s = time.perf_counter() - began
    print(f"vocabulary of {vocab_size}: {took_s:.2f} s, {resident_mb() - before_mb:.0f} MB")
    heads = ("compile ms", "mask us", "p99", "64 at once", "token us", "MB")
    print(f"{'guide':24} " + " ".join(f"{head:>10}" for head in heads))
    for name, guide in GUIDES.items():
        before_mb = resident_mb()
        began = time.perf_counter()
        compiled = try_guide(guide, vocabulary)
        assert compiled.error is None, compiled.error
        start = vocabulary.compile(compiled.grammar)
        compile_ms = (time.perf_counter() - began) * 1e3
        masks, advances, together = walk(vocabulary, start)
        print(
            f"{name:24} {compile_ms:10.1f} {statistics.median(masks):10.0f} {np.percentile(masks, 99):10.0f}"
            f" {statistics.median(together):10.0f} {statistics.median(advances):10.1f}"
            f" {resident_mb() - before_mb:10.1f}"
        )


def walk(vocabulary: GrammarVocabulary, start: Any) -> tuple[list[float], list[float], list[float]]:
    """Return microseconds of masks, of tokens, and of 64 masks at once, along random outputs."""
    masks, advances, together = [], [], []
    rng = np.random.default_rng(0)
    for _ in range(2):
        matchers = [start.deep_copy() for _ in range(64)]
        for _ in range(20):
            began = time.perf_counter()
            vocabulary.masks([matchers[0]])
            masks.append((time.perf_counter() - began) * 1e6)
            began = time.perf_counter()
            made = vocabulary.masks(matchers)
            together.append((time.perf_counter() - began) * 1e6)
            for matcher, mask in zip(matchers, made, strict=True):
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                if not len(allowed):
                    continue
                token = int(rng.choice(allowed))
                began = time.perf_counter()
                matcher.consume_token(token)
                advances.append((time.perf_counter() - began) * 1e6)
    return masks, advances, together


def tokens(vocab_size: int, num_rows: int, rounds: int, length: int) -> None:
    from carousel import LLM, SamplingParams, StructuredOutputsParams

    guide = StructuredOutputsParams(json=STRING)
    params = [
        SamplingParams(max_tokens=length, seed=seed, temperature=1.0, ignore_eos=True)
        for seed in range(num_rows)
    ]
    prompts = [[7 + number] * 8 for number in range(num_rows)]
    with (
        made_model(vocab_size) as folder,
        LLM(
            str(folder),
            load_format="dummy",
            dtype="bfloat16",
            context_length=1024,
            max_running_requests=num_rows,
            disable_radix_cache=True,
        ) as llm,
    ):
        times: dict[str, list[float]] = {"without": [], "guided": []}
        for number in range(rounds + 1):
            for name in times:
                asked = guide if name == "guided" else None
                began = time.perf_counter()
                one = SamplingParams(max_tokens=1, ignore_eos=True)
                llm.generate(prompts, one, use_tqdm=False, structured_outputs=asked)
                first_s = time.perf_counter() - began
                began = time.perf_counter()
                made = llm.generate(prompts, params, use_tqdm=False, structured_outputs=asked)
                took_s = time.perf_counter() - began - first_s
                assert isinstance(made, list)
                assert all(len(each.token_ids) == length for each in made)
                if number:  # the first warms up
                    times[name].append(took_s / (length - 1) * 1e3)
                    print(f"  {name:8} {times[name][-1]:8.1f} ms a token of each of {num_rows}", flush=True)
    without, guided = (statistics.median(times[name]) for name in times)
    print(f"TPOT: {without:.1f} ms without a guide, {guided:.1f} ms with one: {guided / without - 1:+.1%}")


async def gaps_of_streams(url: str, until: Callable[[], bool]) -> list[float]:
    """Return milliseconds between the tokens of successive streams, four at a time."""
    gaps: list[float] = []

    async def stream(client: httpx.AsyncClient) -> None:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not until():
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                last = 0.0
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if last:
                            gaps.append((now - last) * 1e3)
                        last = now

    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        await asyncio.gather(*(stream(client) for _ in range(4)))
    return gaps


def send_bombs(url: str, first: int) -> None:
    """Send the guides at once and wait for their answers, in a process with the lowest priority, because it
    stands for another machine's.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    async def send() -> None:
        limits = httpx.Limits(max_connections=NUM_BOMBS)
        async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
            headers = {"Content-Type": "application/json"}
            bodies = [bomb(first + number) for number in range(NUM_BOMBS)]
            posts = [client.post("/v1/completions", content=body, headers=headers) for body in bodies]
            await asyncio.gather(*posts, return_exceptions=True)

    asyncio.run(send())


def gaps_alone(url: str) -> list[float]:
    ends_s = time.perf_counter() + 5.0
    return asyncio.run(gaps_of_streams(url, lambda: time.perf_counter() > ends_s))


def gaps_beside_bombs(url: str, first: int) -> list[float]:
    process = multiprocessing.Process(target=send_bombs, args=(url, first))
    process.start()
    gaps = asyncio.run(gaps_of_streams(url, lambda: not process.is_alive()))
    process.join()
    return gaps


def bombs(rounds: int) -> None:
    options = ("--cpu-threads", "1", "--max-running-requests", "8", "--max-queued-requests", "1000")
    found: dict[str, list[float]] = {"alone": [], "beside bombs": []}
    with launched(*options) as server:
        for number in range(rounds):
            found["alone"] += gaps_alone(server.url)
            found["beside bombs"] += gaps_beside_bombs(server.url, number * NUM_BOMBS)
    for name, gaps in found.items():
        print(
            f"{name:14} {len(gaps)} gaps: median {statistics.median(gaps):.2f} ms,"
            f" p99 {np.percentile(gaps, 99):.2f}, most {max(gaps):.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["parts", "tokens", "bombs"])
    parser.add_argument("--vocab", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=16)
    options = parser.parse_args()
    if options.what == "parts":
        parts(options.vocab)
    elif options.what == "bombs":
        bombs(options.rounds)
    else:
        tokens(options.vocab, options.rows, options.rounds, options.length)


if __name__ == "__main__":
    main()
