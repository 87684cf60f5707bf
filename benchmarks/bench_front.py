"""Comparison of the ways to one model, in turns: over HTTP, over the client library, and offline (LLM). Also
chats over HTTP without tools, with a tool that the model does not call, and without tools but with a prompt
of the same length and the same shared part, which shows what a tool costs besides its share of the prompt.

For each way it prints the tokens per second of all streams together, prompts included; the CPU time of each
process per token; and the cores that other processes used meanwhile. HTTP and the client library use the same
launch, LLM has a runtime of its own, and the one that is not measured idles. All clients are in this process:
bench_serving's, except for LLM, which does not stream.

Run: python -m benchmarks.bench_front, while nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import uvloop

from bench_serving.backends.base import Backend, GenerationOptions
from bench_serving.backends.openai import OpenAIBackend
from bench_serving.backends.sdk import SdkBackend
from bench_serving.datasets.base import LoadConversation, TokenizerSource
from bench_serving.datasets.random_prompts import random_ids, random_text
from bench_serving.load import Render, Traffic, as_messages, as_text, run_load
from benchmarks.process_cpu import children_of, cpu_by_role, cpu_of, machine_busy
from benchmarks.server import launched
from carousel import LLM, AsyncClient, SamplingParams
from carousel.http_client import HttpClient
from runtime.settings.config import DEMO_MODEL
from runtime.text.tokenizer import load

DEMO_MODEL_NAME = "carousel-demo"
TIMEOUT_S = 120.0
WAYS = ("http", "chat", "tools", "filled", "sdk", "offline")
CHATS = ("chat", "tools", "filled")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ROLES = ("client", "api", "tokenizer", "scheduler", "worker", "detokenizer")


class Sample(NamedTuple):
    """Measurement of one way."""

    num_tokens: int
    duration_s: float
    cpu_s: dict[str, float]
    """CPU seconds by role."""
    others_cores: float
    """Cores that other processes used meanwhile. If it is much, the rates mean nothing."""


Way: TypeAlias = Callable[[list[LoadConversation]], int]
"""Function that sends the prompts, waits for all answers, and returns their number of tokens."""


def streams_over(runner: asyncio.Runner, backend: Backend, render: Render = as_text) -> Way:
    """Return the way that sends all prompts at once over a back end of bench_serving."""

    async def load_all(conversations: list[LoadConversation]) -> int:
        traffic = Traffic(math.inf, None, seed=1)
        result = await run_load(backend, render, conversations, traffic, on_record=lambda _: None)
        for record in result.records:
            if record.error is not None or not record.has_token_counts:
                raise RuntimeError(record.error or "the server did not count the tokens of its chunks")
        return sum(record.output_len for record in result.records)

    return lambda conversations: runner.run(load_all(conversations))


def offline(llm: LLM) -> Way:
    def generate_all(conversations: list[LoadConversation]) -> int:
        turns = [conversation.turns[0] for conversation in conversations]
        params = [
            SamplingParams(max_tokens=turn.output_len, temperature=0.0, ignore_eos=True) for turn in turns
        ]
        completions = llm.generate([turn.prompt for turn in turns], params, use_tqdm=False)
        assert isinstance(completions, list)
        return sum(len(completion.token_ids) for completion in completions)

    return generate_all


def measure(way: Way, conversations: list[LoadConversation], launcher_pid: int) -> Sample:
    own_before_s, before, busy_before_s = cpu_of(os.getpid()), cpu_by_role(launcher_pid), machine_busy()
    began_s = time.perf_counter()
    num_tokens = way(conversations)
    duration_s = time.perf_counter() - began_s
    cpu_s = {role: used - before.get(role, 0.0) for role, used in cpu_by_role(launcher_pid).items()}
    cpu_s["client"] = cpu_of(os.getpid()) - own_before_s
    others_s = machine_busy() - busy_before_s - sum(cpu_s.values())
    return Sample(num_tokens, duration_s, cpu_s, max(0.0, others_s) / duration_s)


@contextmanager
def all_ways(args: argparse.Namespace) -> Iterator[dict[str, tuple[Way, int]]]:
    """Yield each way by name, with the pid of the launcher whose processes serve it."""
    options = GenerationOptions(
        stream=True, ignore_eos=True, add_special_tokens=True, extra={}, counts_tokens=True
    )
    with (
        launched(
            *("--cpu-threads", str(args.cpu_threads), "--max-running-requests", str(args.streams)),
            *("--log-level", "warning"),
        ) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        others = set(children_of(os.getpid()))
        with LLM(cpu_threads=args.cpu_threads, max_running_requests=args.streams) as llm:
            (llm_pid,) = set(children_of(os.getpid())) - others
            http = HttpClient(server.url, {}, timeout_s=TIMEOUT_S, clock=time.perf_counter)
            client = AsyncClient(server.run_dir)
            over_http = OpenAIBackend(http, "completions", DEMO_MODEL_NAME, options, time.perf_counter)
            chat = OpenAIBackend(http, "chat", DEMO_MODEL_NAME, options, time.perf_counter)
            with_tools = replace(options, extra={"tools": TOOLS})
            tools = OpenAIBackend(http, "chat", DEMO_MODEL_NAME, with_tools, time.perf_counter)
            over_zmq = SdkBackend(client, options, timeout_s=TIMEOUT_S, clock=time.perf_counter)
            yield {
                "http": (streams_over(runner, over_http), server.launcher_pid),
                "chat": (streams_over(runner, chat, as_messages), server.launcher_pid),
                "tools": (streams_over(runner, tools, as_messages), server.launcher_pid),
                "filled": (streams_over(runner, chat, as_messages), server.launcher_pid),
                "sdk": (streams_over(runner, over_zmq), server.launcher_pid),
                "offline": (offline(llm), llm_pid),
            }
            runner.run(client.aclose())


def num_tool_tokens() -> int:
    """Return by how many tokens the tool lengthens a prompt."""
    tokenizer, turns = load(DEMO_MODEL), [{"role": "user", "content": "x"}]
    texts = [tokenizer.apply_chat_template(turns, tools=tools) for tools in (TOOLS, ())]
    with_tools, without = map(len, tokenizer.encode_batch(texts, add_special_tokens=False))
    return with_tools - without


def behind(beginning: str, conversations: list[LoadConversation]) -> list[LoadConversation]:
    """Return the conversations with a text in front of each prompt."""
    turns = [conversation.turns[0] for conversation in conversations]
    return [LoadConversation((replace(turn, prompt=f"{beginning}\n{turn.prompt}"),)) for turn in turns]


def run(args: argparse.Namespace) -> dict[str, list[Sample]]:
    source = TokenizerSource(load(DEMO_MODEL))
    samples: dict[str, list[Sample]] = {}
    fill = source.text(np.random.default_rng(0), num_tool_tokens())
    with all_ways(args) as ways:
        for number in range(args.rounds + 1):
            for order, name in enumerate(args.ways.split(",")):
                way, launcher_pid = ways[name]
                # New prompts, so that no way finds another one's in the prefix cache.
                rng = np.random.default_rng([number, order])
                lengths = {"input_len": args.input_len, "output_len": args.output_len}
                draw = random_text if name in CHATS else random_ids  # a conversation needs texts
                prompts = draw(source, rng, args.streams, **lengths, range_ratio=1.0)
                if name == "filled":
                    prompts = behind(fill, prompts)
                sample = measure(way, prompts, launcher_pid)
                if number:  # the first round is the warm-up
                    samples.setdefault(name, []).append(sample)
    return samples


def summarize(samples: list[Sample]) -> dict[str, Any]:
    rates = [sample.num_tokens / sample.duration_s for sample in samples]
    num_tokens = sum(sample.num_tokens for sample in samples)
    roles = sorted({role for sample in samples for role in sample.cpu_s})
    cpu_s = {role: sum(sample.cpu_s.get(role, 0.0) for sample in samples) for role in roles}
    return {
        "tokens_per_s": round(statistics.median(rates)),
        "tokens_per_s_range": [round(min(rates)), round(max(rates))],
        "others_cores": round(statistics.mean(sample.others_cores for sample in samples), 2),
        "cpu_us_per_token": {role: round(1e6 * used / num_tokens, 2) for role, used in cpu_s.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-threads", type=int, default=0, help="of each worker; 0: one per core")
    parser.add_argument("--ways", default=",".join(WAYS), help="of those that the table names")
    args = parser.parse_args()
    report: dict[str, Any] = vars(args) | {name: summarize(found) for name, found in run(args).items()}
    roles = "".join(f"{role:>12}" for role in ROLES)
    print(f"{'':>8} {'tok/s':>8} {'from':>8} {'to':>8} {'others':>8}   CPU us per token:{roles}")
    for name in args.ways.split(","):
        found = report[name]
        low, high = found["tokens_per_s_range"]
        rates = f"{found['tokens_per_s']:8,} {low:8,} {high:8,} {found['others_cores']:8.2f}"
        cells = "".join(f"{found['cpu_us_per_token'].get(role, 0.0):12.2f}" for role in ROLES)
        print(f"{name:>8} {rates}   {'':17}{cells}")
    for name, what in (("chat", "plain chat"), ("filled", "plain chat with a prompt as long")):
        if name in report and "tools" in report:
            ratio = report["tools"]["tokens_per_s"] / report[name]["tokens_per_s"]
            report[f"tools_of_{name}"] = round(ratio, 3)
            print(f"chat with a tool: {ratio:.3f} of {what}")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
