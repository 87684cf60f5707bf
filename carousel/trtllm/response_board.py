"""ResponseBoard: the responses of enqueued requests, for callers who wait by id, by several ids, or for any.

It holds a result from when the request is enqueued until its last response is collected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from carousel.client.core.mailbox import deadline_after
from carousel.trtllm.generation_result import GenerationResult
from carousel.trtllm.responses import Response
from runtime.base.errors import CarouselError, InvalidRequest

TICK_S = 0.1
"""Seconds after which a caller who waits while nothing is enqueued notices that the connection has ended."""


class ResponseBoard:
    def __init__(self, connection_error: Callable[[], CarouselError | None]) -> None:
        self._connection_error = connection_error
        self._closed: CarouselError | None = None
        self._changed = threading.Condition()
        self._results: dict[int, GenerationResult] = {}
        # A dict for its order: what became ready first is handed out first.
        self._ready: dict[int, None] = {}

    def add(self, result: GenerationResult) -> None:
        request_id = result.request.id
        with self._changed:
            self._results[request_id] = result
        result.on_change(lambda: self._set_ready(request_id))

    def _set_ready(self, request_id: int) -> None:
        with self._changed:
            # After the last response was collected, a late call for it finds nothing.
            if request_id in self._results:
                self._ready[request_id] = None
                self._changed.notify_all()

    def close(self, error: CarouselError) -> None:
        """Accept no more results. Callers who wait for any response get `error` once everything was
        collected.
        """
        with self._changed:
            self._closed = error
            self._changed.notify_all()

    def num_ready(self, request_id: int | None = None) -> int:
        """Return the number of responses that could be collected now: of all requests, or of one."""
        with self._changed:
            ids = list(self._ready) if request_id is None else [request_id]
            return sum(self._results[each].num_ready() for each in ids if each in self._ready)

    def take_any(self, timeout: float | None) -> list[Response]:
        """Return responses of all requests that have some: at least one, or none if the time is over."""
        deadline = deadline_after(timeout, time.monotonic())
        with self._changed:
            while True:
                found = [response for each in list(self._ready) for response in self._collect(each)]
                if found or not self._wait(deadline):
                    return found
                error = self._closed or self._connection_error()
                if error is not None and not self._results:
                    raise error.with_traceback(None)

    def take_of(self, request_ids: Sequence[int], timeout: float | None) -> list[list[Response]]:
        """Return the responses of each id; an empty list for an id without any if the time is over. Raises:
        InvalidRequest for an id that is unknown or whose last response was collected; nothing is taken then.
        """
        deadline = deadline_after(timeout, time.monotonic())
        with self._changed:
            for request_id in request_ids:
                self._check_known(request_id)
            return [self._wait_for(request_id, deadline) for request_id in request_ids]

    def _wait_for(self, request_id: int, deadline: float | None) -> list[Response]:
        while request_id in self._results:
            found = list(self._collect(request_id)) if request_id in self._ready else []
            if found:
                return found
            if not self._wait(deadline):
                return []
        return []  # another caller has collected the last one meanwhile

    def _wait(self, deadline: float | None) -> bool:
        """Wait until something may have changed. Returns False if the time is over."""
        remaining = TICK_S if deadline is None else deadline - time.monotonic()
        if remaining <= 0.0:
            return False
        self._changed.wait(min(remaining, TICK_S))
        return True

    def _collect(self, request_id: int) -> Iterator[Response]:
        """Yield all responses of a request. There may be none, if what made it ready was part of an earlier
        response.
        """
        del self._ready[request_id]
        result = self._results[request_id]
        while True:
            response = result.take_response()
            if response is None:
                return
            if response.is_final:
                del self._results[request_id]
            yield response
            if response.is_final:
                return

    def _check_known(self, request_id: int) -> None:
        if request_id not in self._results:
            raise InvalidRequest(
                f"request_id: nothing is to come for {request_id}; was it enqueued, and not yet collected?",
                param="request_id",
            )
