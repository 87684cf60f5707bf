"""Retries of a line, the number of requests at the server at a time, and the end of a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from carousel.batch.lines import BatchRequest
from carousel.batch.pace import RAISE_S, Pace
from carousel.batch.sender import (
    MAX_BROKEN,
    MIN_RETRY_S,
    RETRY_S,
    LineSender,
    ServerGone,
    retry_after_s,
)
from carousel.http_client import AnswerTimeout, HttpAnswer, HttpClient, NotConnected, RequestFailure
from runtime.base.errors import StartError

GOOD = HttpAnswer(200, {}, b"{}")
FULL = HttpAnswer(429, {"retry-after": "7"}, b'{"error": {}}')
PATIENCE_S = 100.0
Reply = HttpAnswer | RequestFailure


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self._yield = asyncio.sleep
        monkeypatch.setattr("carousel.batch.pace.asyncio.sleep", self._sleep)

    async def _sleep(self, delay_s: float) -> None:
        until = self.now + delay_s
        await self._yield(0)
        self.now = max(self.now, until)

    def __call__(self) -> float:
        return self.now


class FakeHttp:
    def __init__(self, reply: Callable[[int], Reply]) -> None:
        self._reply = reply
        self.num_asked = 0

    async def ask(self, path: str, body: bytes) -> HttpAnswer:
        self.num_asked += 1
        reply = self._reply(self.num_asked)
        if isinstance(reply, RequestFailure):
            raise reply
        return reply


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def sender_of(
    http: FakeHttp, clock: Clock, said: list[str], check: Callable[[], None] = lambda: None
) -> LineSender:
    return LineSender(
        cast(HttpClient, http),
        Pace(4, clock),
        patience_s=PATIENCE_S,
        check_server=check,
        say=said.append,
        clock=clock,
    )


def request(number: int = 1) -> BatchRequest:
    return BatchRequest(number, f"r{number}", "/v1/completions", b'{"n": %d}' % number)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@pytest.mark.parametrize(
    ("first", "least_s"),
    [
        (FULL, 7.0),
        (HttpAnswer(503, {}, b"{}"), 1.0),
        (HttpAnswer(502, {}, b"<html>"), 1.0),
        (NotConnected("refused"), 1.0),
        (RequestFailure("broken"), 1.0),
    ],
)
def test_a_line_is_asked_again_when_the_server_says(first: Reply, least_s: float, clock: Clock) -> None:
    said: list[str] = []
    http = FakeHttp(lambda number: first if number == 1 else GOOD)
    line = run(sender_of(http, clock, said).send(request()))
    assert (line.is_good, http.num_asked) == (True, 2)
    assert clock.now == 1000.0 + least_s
    assert len(said) == 1


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("7", 7.0),
        (" 2.5 ", 2.5),
        ("0", MIN_RETRY_S),
        ("1e9", PATIENCE_S),
        ("inf", PATIENCE_S),
        ("9" * 400, PATIENCE_S),
        ("nan", RETRY_S),
        ("-1", RETRY_S),
        ("-inf", RETRY_S),
        ("", RETRY_S),
        ("soon", RETRY_S),
        ("Thu, 01 Jan 1970 00:17:30 GMT", 50.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", PATIENCE_S),
        ("Thu, 01 Jan 1970 00:16:39 GMT", RETRY_S),
        ("Wed, 99 Oct 2026 07:28:00 GMT", RETRY_S),
        ("Wed, 21 Oct 2026 07:28:00 +9999999999", RETRY_S),
    ],
)
def test_a_server_cannot_name_a_time_that_the_run_does_not_outlast(
    given: str, seconds: float, clock: Clock
) -> None:
    """An infinite one ended the run with a traceback."""
    assert retry_after_s(HttpAnswer(429, {"retry-after": given}), PATIENCE_S, clock) == seconds


def test_waits_without_an_end_are_cut_and_the_run_goes_on(clock: Clock) -> None:
    http = FakeHttp(lambda number: HttpAnswer(503, {"retry-after": "inf"}) if number == 1 else GOOD)
    assert run(sender_of(http, clock, []).send(request())).is_good
    assert (http.num_asked, clock.now) == (2, 1000.0 + PATIENCE_S)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 504])
def test_an_answer_is_an_answer_whatever_its_status(status: int, clock: Clock) -> None:
    http = FakeHttp(lambda _: HttpAnswer(status, {}, b'{"error": {}}'))
    line = run(sender_of(http, clock, []).send(request()))
    assert (line.is_good, http.num_asked) == (False, 1)
    assert json.loads(line.data)["response"]["status_code"] == status


def test_an_answer_that_takes_too_long_fails_its_line(clock: Clock) -> None:
    http = FakeHttp(lambda _: AnswerTimeout("no complete answer within 1 s"))
    line = run(sender_of(http, clock, []).send(request()))
    assert json.loads(line.data)["error"]["code"] == "request_timeout"
    assert http.num_asked == 1


def test_a_request_that_breaks_each_connection_fails_alone(clock: Clock) -> None:
    http = FakeHttp(lambda _: RequestFailure("the connection ended"))
    line = run(sender_of(http, clock, []).send(request()))
    assert json.loads(line.data)["error"]["code"] == "connection_lost"
    assert http.num_asked == MAX_BROKEN


def test_a_server_that_never_answers_ends_the_run(clock: Clock) -> None:
    http = FakeHttp(lambda _: NotConnected("x:1: Connection refused"))
    with pytest.raises(ServerGone, match="Connection refused") as caught:
        run(sender_of(http, clock, []).send(request()))
    assert caught.value.exit_code == 75
    assert 1000.0 + PATIENCE_S < clock.now < 1000.0 + PATIENCE_S + 10


def test_a_break_in_an_answer_that_takes_long_is_tried_again(clock: Clock) -> None:
    """The first broken connection ended a run whose answers took longer than its patience."""

    def reply(number: int) -> Reply:
        clock.now += 3 * PATIENCE_S
        return GOOD if number % 3 == 0 else RequestFailure("the connection ended")

    http = FakeHttp(reply)
    sender = sender_of(http, clock, [])
    for number in (1, 2):
        assert run(sender.send(request(number))).is_good
    assert http.num_asked == 6


def test_a_runtime_that_has_ended_is_not_waited_for(clock: Clock) -> None:
    def ended() -> None:
        raise StartError("the runtime has ended")

    http = FakeHttp(lambda _: NotConnected("refused"))
    with pytest.raises(StartError, match="has ended"):
        run(sender_of(http, clock, [], ended).send(request()))
    assert http.num_asked == 1


def test_a_line_that_alone_is_refused_gets_the_refusal_in_the_end(clock: Clock) -> None:
    class Choosy(FakeHttp):
        async def ask(self, path: str, body: bytes) -> HttpAnswer:
            await asyncio.sleep(0)
            return FULL if body == request(1).body else GOOD

    sender = sender_of(Choosy(lambda _: GOOD), clock, [])

    async def both() -> Any:
        task = asyncio.create_task(sender.send(request(1)))
        while not task.done():
            assert (await sender.send(request(2))).is_good
        return await task

    line = run(both())
    assert json.loads(line.data)["response"]["status_code"] == 429
    assert clock.now > 1000.0 + PATIENCE_S


def test_as_many_are_sent_as_the_server_takes(clock: Clock) -> None:
    async def course() -> list[int]:
        pace, limits = Pace(8, clock), []
        for _ in range(8):
            await pace.enter()
        for _ in range(3):  # it took five
            pace.refuse(2.0)
            pace.leave()
        limits.append(pace.limit)
        for _ in range(5):
            pace.leave()
        before = clock.now
        await pace.enter()
        assert clock.now == before + 2.0
        pace.leave()
        limits.append(pace.limit)
        for _ in range(10):
            clock.now += RAISE_S
            await pace.enter()
            pace.leave()
        return [*limits, pace.limit]

    assert run(course()) == [5, 5, 8]


def test_a_server_that_takes_nobody_says_nothing_about_how_many(clock: Clock) -> None:
    async def limit_after_all_were_refused() -> int:
        pace = Pace(3, clock)
        for _ in range(3):
            await pace.enter()
        for _ in range(3):
            pace.refuse(1.0)
            pace.leave()
        return pace.limit

    assert run(limit_after_all_were_refused()) == 3


def test_no_more_than_the_limit_are_at_the_server(clock: Clock) -> None:
    at_once, most = 0, 0

    class Counting(FakeHttp):
        async def ask(self, path: str, body: bytes) -> HttpAnswer:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            for _ in range(3):
                await asyncio.sleep(0)
            at_once -= 1
            return GOOD if at_once < 2 else FULL

    sender = sender_of(Counting(lambda _: GOOD), clock, [])

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(sender.send(request(number)) for number in range(20)))

    assert all(line.is_good for line in run(all_of_them()))
    assert most == 4
