"""ResponseBoard: what enqueued requests have ready, for callers who wait by id, by several ids, or for any.

Holds a result from its enqueueing until its last response was collected; results of `submit` never come here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from client.generation_result import CompletionOutput, GenerationResult
from client.session import deadline_after
from runtime.errors import CarouselError, InvalidRequest

TICK_S = 0.1
"""How soon one who waits while nothing is enqueued sees that the connection has ended."""


@dataclass(frozen=True, slots=True)
class Response:
    """What is new of one request: an output, or the error that ended it."""

    request_id: int
    output: CompletionOutput | None
    error: CarouselError | None = None

    @property
    def is_final(self) -> bool:
        """The last response of its request. Exactly one is."""
        return self.output is None or self.output.finish_reason is not None

    def has_error(self) -> bool:
        return self.error is not None

    def get_result(self) -> CompletionOutput:
        """Raises the error when there is one."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self.output is not None
        return self.output


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
        """Nothing more will be added: who waits for any gets `error` when everything has been collected."""
        with self._changed:
            self._closed = error
            self._changed.notify_all()

    def num_ready(self, request_id: int | None = None) -> int:
        """How many requests have a response ready; of one request, 1 or 0."""
        with self._changed:
            return len(self._ready) if request_id is None else int(request_id in self._ready)

    def take_any(self, timeout: float | None) -> list[Response]:
        """Responses of all requests that have one; at least one, or none when the time is over."""
        deadline = deadline_after(timeout, time.monotonic())
        with self._changed:
            while True:
                responses = [self._collect(request_id) for request_id in list(self._ready)]
                found = [response for response in responses if response is not None]
                if found or not self._wait(deadline):
                    return found
                error = self._closed or self._connection_error()
                if error is not None and not self._results:
                    raise error.with_traceback(None)

    def take_of(self, request_ids: Sequence[int], timeout: float | None) -> list[list[Response]]:
        """For each id, its response; an empty list for one that has none when the time is over.

        Raises: InvalidRequest for an id that is unknown or whose last response was collected; nothing is then
        taken.
        """
        deadline = deadline_after(timeout, time.monotonic())
        with self._changed:
            for request_id in request_ids:
                self._check_known(request_id)
            return [self._wait_for(request_id, deadline) for request_id in request_ids]

    def _wait_for(self, request_id: int, deadline: float | None) -> list[Response]:
        while request_id in self._results:
            response = self._collect(request_id) if request_id in self._ready else None
            if response is not None:
                return [response]
            if not self._wait(deadline):
                return []
        return []  # another caller has collected the last one meanwhile

    def _wait(self, deadline: float | None) -> bool:
        """Until something may have changed. False: the time is over."""
        remaining = TICK_S if deadline is None else deadline - time.monotonic()
        if remaining <= 0.0:
            return False
        self._changed.wait(min(remaining, TICK_S))
        return True

    def _collect(self, request_id: int) -> Response | None:
        """None when what made it ready went out with an earlier response."""
        del self._ready[request_id]
        result = self._results[request_id]
        try:
            output = result.take_output()
        except CarouselError as error:
            response = Response(request_id, None, error)
        else:
            if output is None:
                return None
            response = Response(request_id, output)
            if not response.is_final and result.done:
                self._ready[request_id] = None  # the error that follows a partial output
        if response.is_final:
            del self._results[request_id]
        return response

    def _check_known(self, request_id: int) -> None:
        if request_id not in self._results:
            raise InvalidRequest(
                f"request_id: nothing is to come for {request_id}; was it enqueued, and not yet collected?",
                param="request_id",
            )
