"""Client: generate from a runtime that is already running, from synchronous code. Threads may share one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack, overload

from client.discovery import find_run_dir
from client.request_builder import Prompt, RequestOptions, is_single_prompt, one_per_prompt
from client.result import Completion, Delta, SequenceState
from client.session import ControlOp, Item, Session, control_result, deadline_after, outputs_of
from runtime.errors import Overloaded, RingClosed
from runtime.sampling_params import SamplingParams

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 10.0
# How often a batch that found no room looks for some again; far below the time of one forward step of a
# loaded server.
ROOM_POLL_S = 0.005


class QueueMailbox:
    """A waiter's queue, filled by the I/O thread."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        # SimpleQueue may be used from a destructor that interrupts another call of it; Queue may not.
        self._queue: SimpleQueue[Item] = SimpleQueue()

    def put(self, item: Item) -> None:
        self._queue.put(item)

    def take(self, deadline: float | None) -> list[Item]:
        """Everything that is there, at least one item. Raises TimeoutError at the deadline."""
        try:
            items = [
                self._queue.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            ]
        except Empty:
            raise TimeoutError("the time limit of the call is over") from None
        while True:
            try:
                items.append(self._queue.get_nowait())
            except Empty:
                return items


class ResultStream:
    """Iterator over the deltas of one sequence, for one thread. Leaving it early aborts the request; a thread
    that waits while another one calls `close` gets RequestAborted.
    """

    def __init__(
        self,
        session: Session[QueueMailbox],
        state: SequenceState,
        mailbox: QueueMailbox,
        deadline: float | None,
    ) -> None:
        self.state = state
        """All that has been received so far."""
        self._session = session
        self._mailbox = mailbox
        self._deadline = deadline
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        try:
            delta = self.state.receive(outputs_of(self._mailbox.take(self._deadline)))
        except BaseException:
            self.close()
            raise
        self._ended = delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """Abort unless finished. Idempotent."""
        self._ended = True
        self._session.forget(self.state.request.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    def __init__(
        self, run_dir: str | Path | None = None, *, connect_timeout: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Connect to a runtime; by default to the one that CAROUSEL_RUN_DIR names, else the only one alive.

        Raises: RingClosed when there is none or it does not answer within connect_timeout seconds,
        ConfigError when there are several, ProtocolMismatch when it is another build.
        """
        self._session: Session[QueueMailbox] = Session(
            find_run_dir(run_dir), QueueMailbox, _call, connect_timeout_s=connect_timeout
        )
        try:
            self._session.connection.opened.result()
        except BaseException:
            self.close()
            raise

    @overload
    def generate(
        self,
        prompt: str,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: list[str],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion | list[Completion]:
        """Generate from one prompt (a Completion) or from several (a list in their order).

        A prompt is text, token ids, or chat messages. `sampling_params` is one for all or one for each.
        `timeout` is in seconds and holds for the whole call. Several prompts wait while the server is full;
        any other error ends the call and aborts the rest.

        Raises: RequestError (InvalidRequest, Overloaded ...), RingClosed, TimeoutError.
        """
        deadline = deadline_after(timeout, time.monotonic())
        single = is_single_prompt(prompt)
        prompts: Any = [prompt] if single else prompt
        all_sampling = one_per_prompt(sampling_params, len(prompts))
        completions = self._generate_all(prompts, all_sampling, deadline, options)
        return completions[0] if single else completions

    def _generate_all(
        self,
        prompts: Sequence[Any],
        all_sampling: Sequence[SamplingParams],
        deadline: float | None,
        options: RequestOptions,
    ) -> list[Completion]:
        """In rounds: what the server refuses, because others fill its queue, waits for the next one."""
        if len(prompts) == 1:
            return [_finish(self._open(prompts[0], all_sampling[0], False, deadline, options))]

        def open_stream(number: int) -> ResultStream:
            self._wait_for_room(deadline)
            return self._open(prompts[number], all_sampling[number], False, deadline, options)

        completions: dict[int, Completion] = {}
        numbers = list(range(len(prompts)))
        while True:
            refusal = self._run_round(numbers, open_stream, completions)
            if refusal is None:
                return [completions[number] for number in range(len(prompts))]
            _sleep(refusal.retry_after_s, deadline)
            numbers = [number for number in numbers if number not in completions]

    def _run_round(
        self,
        numbers: list[int],
        open_stream: Callable[[int], ResultStream],
        completions: dict[int, Completion],
    ) -> Overloaded | None:
        """Keeps as many in flight as the server queues for one caller. The refusal, when any was refused."""
        max_in_flight = self._session.max_in_flight()
        streams: deque[tuple[int, ResultStream]] = deque()
        refusal: Overloaded | None = None
        remaining = deque(numbers)
        try:
            while remaining or streams:
                try:
                    if remaining and len(streams) < max_in_flight:
                        number = remaining.popleft()
                        streams.append((number, open_stream(number)))
                    else:
                        number, stream = streams.popleft()
                        completions[number] = _finish(stream)
                except Overloaded as error:
                    refusal = error
                    remaining.clear()
        finally:
            for _, stream in streams:
                stream.close()
        return refusal

    def _wait_for_room(self, deadline: float | None) -> None:
        connection = self._session.connection
        while not connection.has_room and connection.error is None:
            _sleep(ROOM_POLL_S, deadline)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> ResultStream:
        """Generate from one prompt and iterate over what comes, as it comes. The request is made at the call.

        Raises: as `generate`, from the call or from the iteration.
        """
        deadline = deadline_after(timeout, time.monotonic())
        return self._open(prompt, sampling_params, True, deadline, options)

    def _open(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        stream: bool,
        deadline: float | None,
        options: RequestOptions,
    ) -> ResultStream:
        state, mailbox = self._session.open_sequence(prompt, sampling, stream=stream, **options)
        return ResultStream(self._session, state, mailbox, deadline)

    def abort(self, stream: ResultStream) -> None:
        """End a request early; its iterator still delivers what there is, with finish_reason "abort"."""
        self._session.abort(stream.state.request.handle)

    def server_info(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """What the scheduler says of itself. Raises RequestError, RingClosed, TimeoutError."""
        info: dict[str, Any] = control_result(self._control("server_info", timeout))
        return info

    def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        """Forget all cached prefixes that no request uses. Raises RequestError, RingClosed, TimeoutError."""
        return control_result(self._control("flush_cache", timeout))

    def _control(self, op: ControlOp, timeout: float) -> Item:
        return self._session.open_control(op).take(deadline_after(timeout, time.monotonic()))[0]

    def close(self) -> None:
        """Abort what is in flight and disconnect; who waits in another thread gets RingClosed. Idempotent."""
        error = RingClosed("the client was closed")
        self._session.end_all(error)
        self._session.connection.close()
        self._session.fail_all(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _call(function: Callable[[Any], None], argument: Any) -> None:
    function(argument)


def _finish(stream: ResultStream) -> Completion:
    """Wait for the end of a sequence."""
    for _ in stream:
        pass
    return stream.state.completion()


def _sleep(seconds: float, deadline: float | None) -> None:
    """Raises TimeoutError when the deadline comes before the end."""
    if deadline is not None and time.monotonic() + seconds > deadline:
        raise TimeoutError("the time limit of the call is over")
    time.sleep(seconds)
