"""The load: conversations begin at random times, with a limit on how many run at once, and each request gives
a record.

A request that fails is a record with an error, not an exception.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bench_serving.backends.base import Backend, BenchPrompt, ChatTurn
from bench_serving.datasets.base import LoadConversation, Turn
from bench_serving.records import Clock, RequestRecord
from carousel.http_client import RequestFailure

Render: TypeAlias = Callable[[list[ChatTurn]], BenchPrompt]
"""Function that brings a conversation, the user's turn last, into the backend's form. Raises RequestFailure.
"""
OnRecord: TypeAlias = Callable[[RequestRecord], None]

# Second element of the seed, so that arrivals and prompts draw from different streams.
ARRIVAL_STREAM = 1


@dataclass(frozen=True, slots=True)
class Traffic:
    request_rate: float
    """Number of conversations that begin per second; inf: all at once."""
    max_concurrency: int | None
    seed: int
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts, more is more
    even.
    """


@dataclass(frozen=True, slots=True)
class LoadResult:
    records: list[RequestRecord]
    """Records of the turns of each conversation, in the order of the conversations."""
    began_s: float
    duration_s: float
    max_lateness_s: float
    """Longest delay in seconds of a conversation's start, against its plan, that the client itself caused."""
    client_cpu_share: float
    """Share of one core over the duration. Near 1, the client limits the measurement."""


def arrival_times(traffic: Traffic, num: int) -> npt.NDArray[np.float64]:
    """Return the seconds after the start at which each of `num` conversations begins; the first one
    at once.
    """
    if math.isinf(traffic.request_rate):
        return np.zeros(num)
    shape = traffic.burstiness
    rng = np.random.default_rng([traffic.seed, ARRIVAL_STREAM])
    gaps = rng.gamma(shape, 1.0 / (traffic.request_rate * shape), num)
    gaps[:1] = 0.0
    return np.cumsum(gaps)


def as_text(messages: list[ChatTurn]) -> BenchPrompt:
    """Return a conversation without a template: its texts, one after the other."""
    return "".join(message["content"] for message in messages)


def as_messages(messages: list[ChatTurn]) -> BenchPrompt:
    return messages


async def run_load(
    backend: Backend,
    render: Render,
    conversations: Sequence[LoadConversation],
    traffic: Traffic,
    *,
    on_record: OnRecord,
    clock: Clock = time.perf_counter,
) -> LoadResult:
    """Send all conversations and wait for all answers."""
    slots: AbstractAsyncContextManager[object] = nullcontext()
    if traffic.max_concurrency is not None:
        slots = asyncio.Semaphore(traffic.max_concurrency)
    records = [
        [RequestRecord(turn.input_len, turn.output_len) for turn in conversation.turns]
        for conversation in conversations
    ]

    async def converse(index: int) -> None:
        async with slots:
            await _converse(backend, render, conversations[index].turns, records[index], on_record)

    max_lateness_s = 0.0
    cpu_began_s = time.process_time()
    began_s = clock()
    async with asyncio.TaskGroup() as group:
        for index, time_s in enumerate(arrival_times(traffic, len(conversations)).tolist()):
            wait_s = began_s + time_s - clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                wait_s = began_s + time_s - clock()
            max_lateness_s = max(max_lateness_s, -wait_s)
            group.create_task(converse(index))
    duration_s = clock() - began_s
    cpu_s = time.process_time() - cpu_began_s
    return LoadResult(
        [record for each in records for record in each],
        began_s,
        duration_s,
        max_lateness_s,
        cpu_s / duration_s if duration_s else 0.0,
    )


async def _converse(
    backend: Backend,
    render: Render,
    turns: Sequence[Turn],
    records: Sequence[RequestRecord],
    on_record: OnRecord,
) -> None:
    """Send one turn after the other. The answers become part of the next prompt."""
    messages: list[ChatTurn] = []
    history_len = 0
    failed = False
    for turn, record in zip(turns, records, strict=True):
        if failed:
            record.error = "not sent: an earlier turn of the conversation failed"
            on_record(record)
            continue
        record.input_len = history_len + turn.input_len
        try:
            if isinstance(turn.prompt, str):
                messages.append({"role": "user", "content": turn.prompt})
                await backend.generate(render(messages), turn.output_len, record)
            else:
                await backend.generate(turn.prompt, turn.output_len, record)
        except RequestFailure as failure:
            record.error = str(failure)
            failed = True
        on_record(record)
        messages.append({"role": "assistant", "content": record.text})
        history_len = record.input_len + record.output_len
