"""GenerationExecutor: submit requests and collect results later, with the semantics of TensorRT-LLM's
executor.

It is a thin layer over Session: a request's id is its number there. The runtime is either its own, which it
stops, or one that is already running. RayExecutor has a runtime of its own whose ranks are on the machines of
a Ray cluster.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, overload

from carousel.client.core.batch import MAX_IN_FLIGHT
from carousel.client.core.mailbox import deadline_after
from carousel.client.core.puts import put
from carousel.client.core.request.submission import TokenIds, is_single_prompt, one_per_prompt
from carousel.client.core.ring_state import CONNECT_TIMEOUT_S, RING_TIMEOUT_S
from carousel.client.own_runtime import OwnRuntime
from carousel.trtllm.executor_config import ExecutorConfig, KvCacheConfig, PeftCacheConfig, SchedulerConfig
from carousel.trtllm.executor_stats import ExecutorStats, RuntimeQuestions
from carousel.trtllm.generation_request import GenerationRequest
from carousel.trtllm.generation_result import GenerationResult
from carousel.trtllm.response_board import ResponseBoard
from carousel.trtllm.responses import Response
from carousel.trtllm.runtime_link import RuntimeLink, attachable, started
from runtime.base.errors import CarouselError, ConfigError, InvalidRequest, RingClosed
from runtime.wire.sampling_params import SamplingParams

SHUT_DOWN = "the executor was shut down"
RAY = "ray"


class GenerationExecutor(RuntimeQuestions):
    """Executor of requests, usable from any thread and any event loop. Create it with `create`. It ends with
    `shutdown`, with its `with` block, with the process, or when it is garbage-collected.
    """

    def __init__(
        self, run_dir: Path, runtime: OwnRuntime | None, connect_timeout_s: float, ring_timeout_s: float
    ) -> None:
        self.run_dir = run_dir
        """Run directory, which identifies the runtime to other clients."""
        self._submit_lock = threading.Lock()
        link = RuntimeLink(run_dir, runtime, connect_timeout_s, ring_timeout_s)
        self._link, self._session = link, link.session
        super().__init__(link.session)
        connection = link.session.connection
        # Nothing that outlives this object may hold it: its runtime would outlive it too.
        self._board = ResponseBoard(lambda: connection.error)
        # Also called when this object is dropped, and at exit.
        self._end = weakref.finalize(self, _end, link, self._board)
        try:
            self.config = link.wait_open()
            """Settings of the runtime."""
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
        num_postprocess_workers: int | None = None,
        postprocess_tokenizer_dir: str | Path | None = None,
        gather_all_token_logits: bool | None = None,
        enable_chunked_context: bool | None = None,
        executor_config: ExecutorConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        peft_cache_config: PeftCacheConfig | None = None,
        preset: str | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        ring_timeout: float = RING_TIMEOUT_S,
        **settings: Any,
    ) -> Self:
        """Start a runtime and wait until it is ready, or attach to the one at `run_dir`.

        - `engine_dir` is another name of `model`: a directory in Hugging Face format, or owner/name on the
          Hub. Without either the demo model runs.
        - `tokenizer_dir` and `postprocess_tokenizer_dir` are the setting `tokenizer`, of which a runtime has
          one. The default is the model's.
        - `num_postprocess_workers` is the number of detokenizer processes; there is always at least one.
        - `gather_all_token_logits` sets both `gather_context_logits` and `gather_generation_logits`.
        - `enable_chunked_context=False`: each prompt is computed whole, in one step, and a prompt of more
          than max_num_tokens (default then 8192) is refused.
        - `executor_config`, or two of its parts, give settings as TensorRT-LLM's objects, with the defaults
          of these.
        - `preset` is launch.py's.
        - `ring_timeout`: if a process of the runtime that is to be replaced is missing for so many seconds,
          requests end with RingClosed.
        - `settings` are those of launch.py.

        Raises: ConfigError for a wrong or contradictory argument, before anything is started; StartError with
        the runtime's last words; RingClosed or ProtocolMismatch if there is no runtime to attach to.
        """
        given = {
            "model": model,
            "engine_dir": engine_dir,
            "tokenizer_dir": tokenizer_dir,
            "num_postprocess_workers": num_postprocess_workers,
            "postprocess_tokenizer_dir": postprocess_tokenizer_dir,
            "gather_all_token_logits": gather_all_token_logits,
            "enable_chunked_context": enable_chunked_context,
            "executor_config": executor_config,
            "scheduler_config": scheduler_config,
            "kv_cache_config": kv_cache_config,
            "peft_cache_config": peft_cache_config,
            "preset": preset,
            **settings,
        }
        if run_dir is not None:
            return cls(attachable(run_dir, given), None, connect_timeout, ring_timeout)
        runtime = started(given)
        return cls(runtime.run_dir, runtime, connect_timeout, ring_timeout)

    # -- requests and their results --------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Give the request its id and send it. It waits for nothing except the weights of a lora_config that
        the runtime does not have.

        Raises: InvalidRequest, Overloaded, RingClosed; the request then has no id. Refusals by the runtime
        are raised by the result.
        """
        submission = request.submission()
        with request.naming():
            put(self._session, submission, None)
            with self._submit_lock:
                request.check_unsubmitted()
                state, mailbox = self._session.open_request(submission)
                request.set_id(state.number + 1)
        return GenerationResult(request, state, mailbox, self)

    def generate_async(
        self,
        prompt_token_ids: TokenIds,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        **options: Any,
    ) -> GenerationResult:
        """Submit one prompt. `options` are the other arguments of GenerationRequest. Raises what
        GenerationRequest and `submit` raise.
        """
        request = GenerationRequest(prompt_token_ids, sampling_params, streaming=streaming, **options)
        return self.submit(request)

    @overload
    def generate(
        self,
        prompt_token_ids: Sequence[TokenIds],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> GenerationResult: ...

    def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate from one or several prompts and wait. Returns finished results, in the order of the
        prompts.

        `timeout` is in seconds, for the whole call. All prompts are in flight at once, as far as the server
        queues them for one caller. The first error ends the call and aborts the rest.

        Raises: as `submit` and `GenerationResult.result`. A prompt in a wrong form raises before any is
        submitted.
        """
        deadline = deadline_after(timeout, time.monotonic())
        single = is_single_prompt(prompt_token_ids)
        prompts = [prompt_token_ids] if single else prompt_token_ids
        all_sampling: Sequence[SamplingParams | None] = (
            [None] * len(prompts)
            if sampling_params is None
            else one_per_prompt(sampling_params, len(prompts))
        )
        requests = [
            GenerationRequest(prompt, sampling)
            for prompt, sampling in zip(prompts, all_sampling, strict=True)
        ]
        results = self._run_all(requests, deadline)
        return results[0] if single else results

    def _run_all(self, requests: list[GenerationRequest], deadline: float | None) -> list[GenerationResult]:
        max_in_flight = min(self._session.max_in_flight(), MAX_IN_FLIGHT)
        results: list[GenerationResult] = []
        in_flight: deque[GenerationResult] = deque()
        num_in_flight = 0
        try:
            for request in requests:
                request.check()
            for request in requests:
                while in_flight and num_in_flight + request.num_sequences > max_in_flight:
                    oldest = in_flight.popleft()
                    num_in_flight -= oldest.request.num_sequences
                    _wait(oldest, deadline)
                results.append(self.submit(request))
                in_flight.append(results[-1])
                num_in_flight += request.num_sequences
            for result in in_flight:
                _wait(result, deadline)
        except BaseException:
            for result in results:
                result.abort()
            raise
        return results

    def abort_request(self, request_id: int) -> None:
        """Ask for an early end of a request: its result still delivers the output so far, with finish_reason
        "abort". No effect on an id that has ended or never existed.
        """
        self._session.abort(request_id - 1)

    def cancel_request(self, request_id: int) -> None:
        """Same as `abort_request`, under the name that belongs to `enqueue_request`."""
        self.abort_request(request_id)

    # -- enqueue now, await responses later ------------------------------------------------------------------

    def enqueue_request(self, request: GenerationRequest) -> int:
        """Submit a request whose responses `await_responses` collects. Returns its id."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Enqueue requests in order. Returns their ids. If one is invalid, none is enqueued. Raises: as
        `submit`. An error while submitting, such as Overloaded, aborts the requests before it.
        """
        if len(set(map(id, requests))) < len(requests):
            raise InvalidRequest("requests: the same one stands there twice", param="requests")
        for request in requests:
            request.check()
        results: list[GenerationResult] = []
        try:
            for request in requests:
                results.append(self.submit(request))  # noqa: PERF401 - those before an error count
        except BaseException:
            for result in results:
                result.abort()
            raise
        for result in results:
            self._board.add(result)
        return [request.id for request in requests]

    @overload
    def await_responses(
        self, request_id: int | timedelta | None = None, timeout: float | timedelta | None = None
    ) -> list[Response]: ...

    @overload
    def await_responses(
        self, request_id: Sequence[int], timeout: float | timedelta | None = None
    ) -> list[list[Response]]: ...

    def await_responses(
        self,
        request_id: int | Sequence[int] | timedelta | None = None,
        timeout: float | timedelta | None = None,
    ) -> list[Response] | list[list[Response]]:
        """Wait for responses to enqueued requests and collect them: of any request, of one, or of several.

        Returns at least one response (for several ids: one list for each, in their order), or none if
        `timeout` passes: seconds, or a timedelta as with TensorRT-LLM, which may also be given alone. A
        response is collected once, by one caller.

        Raises: InvalidRequest for an id with no response to come, RingClosed if no response can come at all.
        """
        if isinstance(request_id, timedelta):
            request_id, timeout = None, request_id
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if request_id is None:
            return self._board.take_any(seconds)
        if isinstance(request_id, int):
            return self._board.take_of([request_id], seconds)[0]
        return self._board.take_of(request_id, seconds)

    def num_responses_ready(self, request_id: int | None = None) -> int:
        """Return the number of responses that could be collected now: of all enqueued requests, or of one."""
        return self._board.num_ready(request_id)

    # -- the whole -------------------------------------------------------------------------------------------

    def max_in_flight(self) -> int:
        """Return the number of sequences that the runtime queues for one caller without refusing any."""
        return self._session.max_in_flight()

    @property
    def error(self) -> CarouselError | None:
        """Return the error that ended the runtime, or that of `shutdown`; None while it runs."""
        if not self._end.alive:
            return RingClosed(SHUT_DOWN)
        return self._session.connection.error

    def get_latest_stats(self) -> ExecutorStats | None:
        """Return the scheduler's latest figures without asking it; None before the first ones. Raises:
        RingClosed if the connection has ended.
        """
        error = self.error
        if error is not None:
            raise error.with_traceback(None)
        return self._link.latest_stats()

    def shutdown(self) -> None:
        """Abort all requests in flight, disconnect, and stop the runtime if it is the executor's own. Waiting
        callers get RingClosed, and so does every later call except this one.
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class RayExecutor(GenerationExecutor):
    """GenerationExecutor with a runtime of its own whose ranks are on machines of a Ray cluster, including
    this one. Ray places the runtime's agents and replaces lost machines. Requests and steps do not go through
    Ray, and this process does not import it.
    """

    @classmethod
    def create(cls, model: str | Path | None = None, **settings: Any) -> Self:
        """Start a runtime on `nnodes` machines of the Ray cluster that runs here, or at RAY_ADDRESS, and wait
        until it is ready. `dist_addr` is the address where they meet. All other arguments are those of
        `GenerationExecutor.create`, except `run_dir`.

        Raises: as that; the StartError says what Ray lacks.
        """
        if settings.get("run_dir") is not None:
            raise ConfigError("run_dir: what runs there has its machines; attach with GenerationExecutor")
        if settings.setdefault("executor", RAY) != RAY:
            raise ConfigError(f"executor: RayExecutor has {RAY}, got {settings['executor']!r}; leave it out")
        return super().create(model, **settings)


def _wait(result: GenerationResult, deadline: float | None) -> None:
    result.result(None if deadline is None else max(0.0, deadline - time.monotonic()))


def _end(link: RuntimeLink, board: ResponseBoard) -> None:
    error = RingClosed(SHUT_DOWN)
    link.disconnect(error)
    board.close(error)
    link.stop_runtime()
