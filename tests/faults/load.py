"""Load: callers that never stop asking, over the client library and over HTTP, and what they got.

Every prompt's text is known from an undisturbed run; greedy decoding in float32 gives it again whatever runs
beside it. A caller that gets an error or another text writes that down and goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from carousel import AsyncClient, SamplingParams
from runtime.base.errors import CarouselError
from tests.harness.ring.launched import wait_until

PROMPTS = tuple(
    f"{opening} number {number} and how it {verb}"
    for number, (opening, verb) in enumerate(
        itertools.product(("The story", "A letter", "One day"), ("began", "ended"))
    )
)
LENGTHS = (40, 120, 300)
REQUEST_TIMEOUT_S = 120.0
SILENT_S = 2 * REQUEST_TIMEOUT_S
"""Seconds without anything for any caller, after which those that wait count as stuck. A single request has
no limit: it may go through several restarts, each of which may take minutes on a busy machine.
"""
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
"""Nobody uses a connection that the server is about to close for being idle: that gets no answer."""
MODEL = "carousel-demo"


def body(prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Account:
    num_done: int = 0
    num_pieces: int = 0
    """Pieces of streams that have come."""
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Texts that are not those of the undisturbed run."""
    longest_gap_s: float = 0.0
    """Between two pieces of one stream."""


class Load:
    """`num_streams` streams of the client library and a third as many of HTTP, and plain HTTP calls."""

    def __init__(self, run_dir: Path, url: str, *, num_streams: int, num_http: int, num_plain: int) -> None:
        self._run_dir = run_dir
        self._url = url
        self._counts = (num_streams, num_http, num_plain)
        self._texts: dict[tuple[str, int], str] = {}
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.account = Account()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        asyncio.run(self._learn())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Let every caller finish what it has asked for."""
        self._stop.set()
        before = -1
        while self._thread.is_alive():
            num_got = self.account.num_done + self.account.num_pieces
            assert num_got > before, "a caller waits for ever"
            before = num_got
            self._thread.join(SILENT_S)
        if self._error is not None:
            raise self._error

    def wait_for_more(self) -> None:
        """Wait until one more request is answered, or has failed: callers are there now."""
        account = self.account
        num_before = account.num_done
        wait_until(
            lambda: account.num_done > num_before or bool(account.failed), REQUEST_TIMEOUT_S, "an answer more"
        )

    def reset_gap(self) -> float:
        """The longest gap since the last time."""
        gap_s, self.account.longest_gap_s = self.account.longest_gap_s, 0.0
        return gap_s

    def _run(self) -> None:
        try:
            asyncio.run(self._call())
        except BaseException as error:
            self._error = error

    async def _learn(self) -> None:
        keys = list(itertools.product(PROMPTS, LENGTHS))
        async with AsyncClient(self._run_dir) as client:
            completions = await asyncio.gather(
                *(client.generate(prompt, sampling(length)) for prompt, length in keys)
            )
        self._texts = {key: completion.text for key, completion in zip(keys, completions, strict=True)}

    async def _call(self) -> None:
        streams, http, plain = self._counts
        async with (
            AsyncClient(self._run_dir) as client,
            httpx.AsyncClient(base_url=self._url, timeout=None, limits=LIMITS) as caller,
        ):
            await asyncio.gather(
                *(self._repeat(number, self._stream, client) for number in range(streams)),
                *(self._repeat(number, self._stream_http, caller) for number in range(http)),
                *(self._repeat(number, self._plain, caller) for number in range(plain)),
            )

    async def _repeat(self, number: int, ask: Any, client: Any) -> None:
        keys = itertools.cycle(self._texts)
        for _ in range(number % len(self._texts)):
            next(keys)
        while not self._stop.is_set():
            prompt, length = key = next(keys)
            try:
                text = await ask(client, prompt, length)
            except (CarouselError, httpx.HTTPError, TimeoutError, _Refused) as error:
                self.account.failed.append(f"{ask.__name__}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)
                continue
            self.account.num_done += 1
            if text != self._texts[key]:
                self.account.wrong.append(f"{ask.__name__}: {text[:200]!r} for {self._texts[key][:200]!r}")

    def _note_gap(self, last: float) -> float:
        now = time.monotonic()
        self.account.num_pieces += 1
        self.account.longest_gap_s = max(self.account.longest_gap_s, now - last)
        return now

    async def _stream(self, client: AsyncClient, prompt: str, length: int) -> str:
        text, last = "", time.monotonic()
        async for delta in client.stream(prompt, sampling(length)):
            text += delta.text
            last = self._note_gap(last)
        return text

    async def _stream_http(self, caller: httpx.AsyncClient, prompt: str, length: int) -> str:
        text, is_done, last = "", False, time.monotonic()
        request = body(prompt, length, stream=True)
        async with caller.stream("POST", "/v1/completions", json=request) as response:
            _check(response)
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                last = self._note_gap(last)
                if data == "[DONE]":
                    is_done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        raise _Refused(data)
                    text += "".join(choice["text"] for choice in event["choices"])
        if not is_done:
            raise _Refused("the stream has no end")
        return text

    async def _plain(self, caller: httpx.AsyncClient, prompt: str, length: int) -> str:
        response = await caller.post("/v1/completions", json=body(prompt, length, stream=False))
        _check(response)
        text: str = response.json()["choices"][0]["text"]
        return text


class _Refused(Exception):
    """An answer that is an error."""


def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise _Refused(f"status {response.status_code}")
