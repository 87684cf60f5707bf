"""GenerationExecutor: submit and collect later, with the semantics of TensorRT-LLM's executor.

Thin over Session: a request's id is the number in its handle, so nothing maps one to the other. Two back
ends: a runtime of its own, or one that is already running; they differ in who stops it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

from client.client import CONNECT_TIMEOUT_S
from client.connection import MAX_UNSENT
from client.generation_request import GenerationRequest
from client.generation_result import GenerationResult, ResultMailbox
from client.llm import OwnRuntime
from client.request_builder import TokenIds, is_single_prompt, one_per_prompt
from client.responses import Response, ResponseBoard
from client.session import MAX_SEQ, Session, deadline_after
from runtime.endpoints import Endpoints
from runtime.errors import CarouselError, ConfigError, InvalidRequest, RingClosed
from runtime.handle import make_handle, split_handle
from runtime.sampling_params import SamplingParams
from runtime.status_page import StatusPage

MAX_ID = 1 << 48
"""As many as the sequence number and the index of a handle tell apart."""


@dataclass(frozen=True, slots=True)
class ExecutorStats:
    """What the scheduler says of itself, at most a step old."""

    num_active_requests: int
    """Admitted and not finished."""
    num_queued_requests: int
    """Waiting to be admitted, for the first time or after a retraction."""
    num_received_requests: int
    """Since its start."""
    num_free_pages: int
    num_pages: int


class GenerationExecutor:
    """Any thread and any event loop may use one. Make it with `create`."""

    def __init__(self, run_dir: Path, runtime: OwnRuntime | None, connect_timeout_s: float) -> None:
        self.run_dir = run_dir
        """Names the runtime to other clients."""
        self._submit_lock = threading.Lock()
        self._end: CarouselError | None = None
        self._stop_runtime: Callable[[], object] = _stop_nothing
        if runtime is not None:
            # Also called when this object is dropped, and at exit.
            self._stop_runtime = weakref.finalize(self, runtime.stop)
        try:
            if runtime is not None:
                runtime.wait_ready()
            self._session: Session[ResultMailbox] = Session(
                run_dir, ResultMailbox, _call, connect_timeout_s=connect_timeout_s
            )
        except BaseException:
            self._stop_runtime()
            raise
        connection = self._session.connection
        # Nothing that outlives this object may hold it: its runtime would outlive it too.
        self._board = ResponseBoard(lambda: connection.error)
        try:
            connection.opened.result()
            self._status = StatusPage(Endpoints(run_dir).status_file)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def create(
        cls,
        model: str | Path | None = None,
        *,
        run_dir: str | Path | None = None,
        engine_dir: str | Path | None = None,
        tokenizer_dir: str | Path | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        **settings: Any,
    ) -> Self:
        """Start a runtime and wait until it is ready, or attach to the one at `run_dir`.

        `engine_dir` is another name of `model`, a directory in Hugging Face format; without either the demo
        model runs. `tokenizer_dir` is the setting `tokenizer`. `settings` are those of launch.py.
        Raises: ConfigError for a wrong or contradictory argument, StartError with the runtime's last words,
        RingClosed or ProtocolMismatch when there is none to attach to.
        """
        own = {"model": model, "engine_dir": engine_dir, "tokenizer_dir": tokenizer_dir, **settings}
        given = [name for name, value in own.items() if value is not None]
        if run_dir is not None:
            if given:
                raise ConfigError(f"{given[0]}: the runtime at run_dir has been started with its own")
            return cls(Path(run_dir).absolute(), None, connect_timeout)
        if model is not None and engine_dir is not None:
            raise ConfigError("engine_dir: another name of model; give one of them")
        if tokenizer_dir is not None:
            if "tokenizer" in settings:
                raise ConfigError("tokenizer_dir: another name of tokenizer; give one of them")
            settings["tokenizer"] = tokenizer_dir
        runtime = OwnRuntime(model or engine_dir or "", settings)
        return cls(runtime.run_dir, runtime, connect_timeout)

    # -- requests and their results --------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Give the request its id and send it on its way; waits for nothing.

        Raises: InvalidRequest, Overloaded, RingClosed; the request then has no id. What the runtime refuses
        comes from the result.
        """
        with self._submit_lock:
            request.check_unsubmitted()
            state, mailbox = self._session.open_sequence(
                request.prompt_token_ids,
                request.sampling_params,
                stream=request.streaming,
                **request.options(),
            )
            handle = state.request.handle
            request.set_id(_id_of(handle))
        return GenerationResult(request, state, mailbox, lambda: self._session.abort(handle))

    def generate_async(
        self,
        prompt_token_ids: TokenIds,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        **options: Any,
    ) -> GenerationResult:
        """Submit one prompt. `options` are the other arguments of GenerationRequest. Raises what it and
        `submit` do.
        """
        request = GenerationRequest(prompt_token_ids, sampling_params, streaming=streaming, **options)
        return self.submit(request)

    @overload
    def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt_token_ids: Sequence[TokenIds],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate from one prompt or from several, and wait: the results are done and in the prompts' order.

        `timeout` is in seconds and holds for the whole call. All are in flight at once, as far as the server
        queues them for one caller. The first error ends the call and aborts the rest.
        Raises: as `submit` and `GenerationResult.result`; a prompt in a wrong form before any is submitted.
        """
        deadline = deadline_after(timeout, time.monotonic())
        single = is_single_prompt(prompt_token_ids)
        prompts = [prompt_token_ids] if single else prompt_token_ids
        all_sampling = one_per_prompt(sampling_params, len(prompts))
        requests = [
            GenerationRequest(prompt, sampling)
            for prompt, sampling in zip(prompts, all_sampling, strict=True)
        ]
        results = self._run_all(requests, deadline)
        return results[0] if single else results

    def _run_all(self, requests: list[GenerationRequest], deadline: float | None) -> list[GenerationResult]:
        max_in_flight = min(self._session.max_in_flight(), MAX_UNSENT)
        results: list[GenerationResult] = []
        try:
            for number, request in enumerate(requests):
                if number >= max_in_flight:
                    _wait(results[number - max_in_flight], deadline)
                results.append(self.submit(request))
            for result in results:
                _wait(result, deadline)
        except BaseException:
            for result in results:
                result.abort()
            raise
        return results

    def abort_request(self, request_id: int) -> None:
        """Ask for an early end: the result still delivers what there is, with finish_reason "abort". Without
        effect on an id that has ended or never was.
        """
        if 0 < request_id <= MAX_ID:
            self._session.abort(_handle_of(self._session.connection.client_id, request_id))

    # -- enqueue now, await responses later ------------------------------------------------------------------

    def enqueue_request(self, request: GenerationRequest) -> int:
        """As `submit`, with its responses collected by `await_responses`; the id to ask for."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Enqueue in order; their ids. When one is wrong in itself, none is enqueued.

        Raises: as `submit`. An error between them, such as Overloaded, aborts those before it.
        """
        if len(set(map(id, requests))) < len(requests):
            raise InvalidRequest("requests: the same one stands there twice", param="requests")
        for request in requests:
            request.check()
        results: list[GenerationResult] = []
        try:
            for request in requests:
                results.append(self.submit(request))  # noqa: PERF401 - those before an error count
        except CarouselError:
            for result in results:
                result.abort()
            raise
        for result in results:
            self._board.add(result)
        return [request.id for request in requests]

    @overload
    def await_responses(
        self, request_id: int | None = None, *, timeout: float | None = None
    ) -> list[Response]: ...

    @overload
    def await_responses(
        self, request_id: Sequence[int], *, timeout: float | None = None
    ) -> list[list[Response]]: ...

    def await_responses(
        self, request_id: int | Sequence[int] | None = None, *, timeout: float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Wait for responses to enqueued requests and collect them: of any request, of one, or of several.

        At least one response (for several ids: one list for each, in their order); none when `timeout`
        seconds are over. A response is collected once, by one caller.
        Raises: InvalidRequest for an id that nothing is to come for, RingClosed when nothing can come at all.
        """
        if request_id is None:
            return self._board.take_any(timeout)
        if isinstance(request_id, int):
            return self._board.take_of([request_id], timeout)[0]
        return self._board.take_of(request_id, timeout)

    def num_responses_ready(self, request_id: int | None = None) -> int:
        """How many enqueued requests have a response to collect; of one request, 1 or 0."""
        return self._board.num_ready(request_id)

    # -- the whole -------------------------------------------------------------------------------------------

    def get_latest_stats(self) -> ExecutorStats | None:
        """The scheduler's newest word, without asking it; None while it has said nothing.

        Raises: RingClosed when the connection has ended.
        """
        error = self._end or self._session.connection.error
        if error is not None:
            raise error.with_traceback(None)
        status = self._status.read("scheduler")
        if status.state == "absent":
            return None
        return ExecutorStats(
            num_active_requests=status.num_running,
            num_queued_requests=status.num_waiting,
            num_received_requests=status.num_received,
            num_free_pages=status.num_free_pages,
            num_pages=status.num_pages,
        )

    def shutdown(self) -> None:
        """Abort what is in flight, disconnect, and stop the runtime if it is its own. Who waits gets
        RingClosed, and so does every later call but this one.
        """
        error = self._end = RingClosed("the executor was shut down")
        self._session.end_all(error)
        self._session.connection.close()
        self._session.fail_all(error)
        self._board.close(error)
        self._stop_runtime()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _id_of(handle: bytes) -> int:
    _, seq, index, _ = split_handle(handle)
    return (index << 32 | seq) + 1


def _handle_of(client: int, request_id: int) -> bytes:
    number = request_id - 1
    return make_handle(client, number & MAX_SEQ, number >> 32)


def _wait(result: GenerationResult, deadline: float | None) -> None:
    result.result(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _call(function: Callable[[Any], None], argument: Any) -> None:
    function(argument)


def _stop_nothing() -> None:
    """The runtime that an executor is attached to goes on without it."""
