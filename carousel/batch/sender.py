"""LineSender: asks the server for one line after another, and again where that may help."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

from carousel.batch.lines import BatchRequest, OutputLine, answered, failed
from carousel.batch.pace import Pace
from carousel.http_client import AnswerTimeout, HttpAnswer, HttpClient, NotConnected, RequestFailure
from runtime.base.errors import EXIT_DRAIN_CUT, StartError

TRIED_AGAIN = (429, 502, 503)
"""Statuses of a server that has not begun with a request: too many of them, or nobody behind it."""
RETRY_S = 1.0
"""Seconds until the next try if the server does not say."""
MIN_RETRY_S = 0.1
"""Least seconds until the next try, also where the server names fewer."""
MAX_BROKEN = 5
"""Connections that may end within one line's answer. A request that ends the server each time must not hold
up the others for ever.
"""
SAY_S = 10.0
"""Seconds between two lines about a server that does not take requests."""


class ServerGone(StartError):
    """The server has answered nothing for so long that the run ends. The lines without an answer can be
    resumed.
    """

    exit_code = EXIT_DRAIN_CUT


class LineSender:
    def __init__(
        self,
        http: HttpClient,
        pace: Pace,
        *,
        patience_s: float,
        check_server: Callable[[], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """patience_s: seconds in which tries fail and none is answered, after which the run ends.
        check_server: raises StartError if the server will not come back. say: tells the user a line.
        """
        self._http = http
        self._pace = pace
        self._patience_s = patience_s
        self._check_server = check_server
        self._say = say
        self._clock = clock
        self._answered_at = self._failing_since = clock()
        self._next_try_at = float("-inf")
        """Time from which on requests are sent after the last failure."""
        self._say_at = 0.0

    async def send(self, request: BatchRequest) -> OutputLine:
        """Return the line of output of a request. Raises ServerGone, or what `check_server` raises."""
        began = self._clock()
        num_broken = 0
        while True:
            await self._pace.enter()
            try:
                answer = await self._http.ask(request.url, request.body)
                if answer.status not in TRIED_AGAIN:
                    self._answered_at = self._clock()
                    self._next_try_at = float("-inf")
                    return answered(request, answer)
                retry_s = retry_after_s(answer, self._patience_s)
                reason = f"HTTP {answer.status}"
                # Others are answered, so it is this line's own.
                if min(self._answered_at, self._clock() - self._patience_s) > began:
                    return answered(request, answer)
                self._pace.refuse(retry_s)
            except AnswerTimeout as failure:
                return failed(request, "request_timeout", str(failure))
            except RequestFailure as failure:
                num_broken += not isinstance(failure, NotConnected)
                if num_broken >= MAX_BROKEN:
                    return failed(request, "connection_lost", f"{MAX_BROKEN} times: {failure}")
                retry_s, reason = RETRY_S, str(failure)
                self._pace.refuse(retry_s)
            finally:
                self._pace.leave()
            self._note_failure(retry_s, reason)

    def _note_failure(self, retry_s: float, reason: str) -> None:
        """Note a try that has failed. Raises ServerGone, or what `check_server` raises."""
        self._check_server()
        now = self._clock()
        if now - self._next_try_at > self._patience_s:
            # Until now the server had taken all that it was asked, or answered.
            self._failing_since = now
        self._next_try_at = max(self._next_try_at, now + retry_s)
        if now - self._failing_since > self._patience_s:
            raise ServerGone(f"no answer for {self._patience_s:g} s, at last: {reason}")
        if now >= self._say_at:
            self._say_at = now + SAY_S
            self._say(f"waiting for the server: {reason}")


def retry_after_s(answer: HttpAnswer, most_s: float, clock: Callable[[], float] = time.time) -> float:
    """Return the seconds of a Retry-After header, at least MIN_RETRY_S and at most most_s; RETRY_S without
    one, or if it is neither a number nor a time to come. clock: seconds since 1970, for a date.
    """
    given = answer.headers.get("retry-after", "").strip()
    try:
        seconds = float(given)
    except ValueError:
        seconds = _seconds_until(given, clock)
    if not seconds >= 0:  # "nan" is a number to Python, too
        return RETRY_S
    return min(max(seconds, MIN_RETRY_S), most_s)


def _seconds_until(date: str, clock: Callable[[], float]) -> float:
    """Return the seconds until the date in a Retry-After header; -1 if it is not a date."""
    try:
        return parsedate_to_datetime(date).timestamp() - clock()
    except (ValueError, OverflowError):
        return -1.0
