"""Crowd: callers of another kind beside the load. Some leave in the middle, some come all at once, some send
nonsense. None of them may get an answer that the server has no right to give.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from carousel import AsyncClient, SamplingParams
from runtime.base.errors import CarouselError
from tests.faults.load import LIMITS, REQUEST_TIMEOUT_S, body
from tests.harness.http.mutated_bodies import mutated_bodies

NUM_LEAVERS = 8
BURST = 128
BURST_PAUSE_S = 20.0
JOIN_S = 6 * REQUEST_TIMEOUT_S
NONSENSE_PAUSE_S = 0.05
NONSENSE_TIMEOUT_S = 5 * REQUEST_TIMEOUT_S
"""A chat whose limit has been mutated away goes on to the context's end."""


class Crowd:
    def __init__(self, run_dir: Path, url: str, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        """How often each thing has happened."""
        self.wrong: list[str] = []
        self._run_dir, self._url = run_dir, url
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "one of the crowd waits for ever"

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as error:
            self.wrong.append(f"the crowd ended: {type(error).__name__}: {error}")

    async def _all(self) -> None:
        async with (
            AsyncClient(self._run_dir) as client,
            httpx.AsyncClient(base_url=self._url, timeout=REQUEST_TIMEOUT_S, limits=LIMITS) as http,
        ):
            await asyncio.gather(
                *(self._repeat(self._leave, client) for _ in range(NUM_LEAVERS)),
                *(self._repeat(self._leave_http, http) for _ in range(NUM_LEAVERS)),
                self._repeat(self._come_in_a_burst, http),
                self._repeat(self._talk_nonsense, http),
            )

    async def _repeat(self, come: Callable[[Any], Awaitable[None]], client: Any) -> None:
        while not self._stop.is_set():
            try:
                await come(client)
            except (CarouselError, httpx.HTTPError) as error:
                self.wrong.append(f"{come.__name__}: {type(error).__name__}: {error}")
            except TimeoutError:
                self.wrong.append(f"{come.__name__}: no answer")

    async def _leave(self, client: AsyncClient) -> None:
        """A stream of the client library, left after some pieces."""
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        num_pieces = self._rng.randrange(1, 60)
        async with client.stream("Once", sampling, timeout=REQUEST_TIMEOUT_S) as stream:
            async for _ in stream:
                num_pieces -= 1
                if num_pieces <= 0:
                    break
        self.outcomes["left a stream"] += 1

    async def _leave_http(self, http: httpx.AsyncClient) -> None:
        """An HTTP request, streamed or not, left at some moment: queued, in prefill or in decode."""
        request = body("Once", 400, stream=self._rng.random() < 0.7)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.random() * 2.0):
                await http.post("/v1/completions", json=request)
        self.outcomes["left a connection"] += 1

    async def _come_in_a_burst(self, http: httpx.AsyncClient) -> None:
        bodies = [body(f"{number}", 8, stream=False) for number in range(BURST)]
        for response in await asyncio.gather(*(http.post("/v1/completions", json=each) for each in bodies)):
            self.outcomes[f"burst {response.status_code}"] += 1
            if response.status_code != 200 and not is_refusal(response):
                self.wrong.append(f"burst: {response.status_code} {response.text[:300]}")
        await asyncio.to_thread(self._stop.wait, BURST_PAUSE_S)

    async def _talk_nonsense(self, http: httpx.AsyncClient) -> None:
        ((path, data),) = mutated_bodies(1, self._rng)
        response = await http.post(
            path, content=data, headers={"content-type": "application/json"}, timeout=NONSENSE_TIMEOUT_S
        )
        self.outcomes[f"nonsense {response.status_code}"] += 1
        if response.status_code >= 500 and not is_refusal(response):
            self.wrong.append(f"{path} {data[:300]!r}: {response.status_code} {response.text[:300]}")
        await asyncio.sleep(NONSENSE_PAUSE_S)


def is_refusal(response: httpx.Response) -> bool:
    """Return True if it says when to come back."""
    return response.status_code in (429, 503) and int(response.headers["Retry-After"]) >= 1
