"""Client: generate from a runtime that is already running, from synchronous code. Threads may share one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack, overload

from client.batch import Batch
from client.discovery import find_target
from client.request_builder import Prompt, RequestOptions, is_single_prompt, one_per_prompt
from client.request_state import RequestState
from client.result import Completion, Delta
from client.session import ControlOp, Item, Session, control_result, deadline_after
from runtime.errors import RingClosed
from runtime.sampling_params import SamplingParams

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 10.0


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
        # One thread reads, so what it sees there stays there.
        while not self._queue.empty():
            items.append(self._queue.get())
        return items


class ResultStream:
    """Iterator over the deltas of all sequences of one request, for one thread: of each what is new, as it
    comes. Leaving it early aborts the request; a thread that waits while another one calls `close` gets
    RequestAborted.
    """

    def __init__(
        self,
        session: Session[QueueMailbox],
        state: RequestState,
        mailbox: QueueMailbox,
        deadline: float | None,
    ) -> None:
        self.state = state
        """All that has been received so far."""
        self._session = session
        self._mailbox = mailbox
        self._deadline = deadline
        self._deltas: deque[Delta] = deque()
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while self._closed or not self._deltas:
            if self._closed or self.state.ended:
                raise StopIteration
            try:
                self._deltas.extend(self.state.receive(self._mailbox.take(self._deadline)))
            except BaseException:
                self.close()
                raise
        return self._deltas.popleft()

    def close(self) -> None:
        """Abort unless finished. Idempotent."""
        self._closed = True
        self._session.forget(self.state.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        curve_dir: str | Path | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Connect to a runtime; by default to the one that CAROUSEL_RUN_DIR names, else the only one alive.

        `run_dir` may be an address tcp://HOST:PORT; `curve_dir` then holds this client's `client.key_secret`
        and the server's `server.key`, and is needed unless HOST is this machine.
        Raises: RingClosed when there is none or it does not answer within connect_timeout seconds,
        ConfigError when there are several or a key is wrong, ProtocolMismatch when it is another build.
        """
        self._session: Session[QueueMailbox] = Session(
            find_target(run_dir, curve_dir), QueueMailbox, _call, connect_timeout_s=connect_timeout
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
        return self._generate(prompt, sampling_params, timeout, options, _ignore)

    def _generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        timeout: float | None,
        options: RequestOptions,
        on_completion: Callable[[Completion], None],
    ) -> Completion | list[Completion]:
        """`on_completion` is called with each as it ends."""
        deadline = deadline_after(timeout, time.monotonic())
        single = is_single_prompt(prompt)
        prompts: Any = [prompt] if single else prompt
        all_sampling = one_per_prompt(sampling_params, len(prompts))
        if len(prompts) == 1:
            # Nothing else could wait for it, so a refusal is the caller's to see.
            completion = _finish(self._open(prompts[0], all_sampling[0], False, deadline, options))
            on_completion(completion)
            return completion if single else [completion]
        return Batch(self._session, prompts, all_sampling, deadline, options, on_completion).run()

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
        state, mailbox = self._session.open_request(prompt, sampling, stream=stream, **options)
        return ResultStream(self._session, state, mailbox, deadline)

    def abort(self, stream: ResultStream) -> None:
        """End a request early; its iterator still delivers what there is, with finish_reason "abort"."""
        self._session.abort(stream.state.number)

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


def _ignore(_: Completion) -> None:
    """Nobody watches."""


def _finish(stream: ResultStream) -> Completion:
    """Wait for the end of a request."""
    for _ in stream:
        pass
    return stream.state.completion()
