"""BatchManager: the callbacks of TensorRT-LLM's batch manager over a GenerationExecutor.

It adds a thread that gets requests and sends responses, and a table of the caller's own ids. It schedules
nothing. One turn of the thread, an iteration:

        get requests → submit → wait for responses (TURN_S at most) → send → poll stop signals → report
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

from carousel.client.core.result import respelled
from carousel.client.core.stats import StatsPlace
from carousel.trtllm.executor import GenerationExecutor
from carousel.trtllm.inference_request import (
    ARRAY_NAMES,
    InferenceRequest,
    InputArrays,
    generation_request,
    padding_id,
)
from carousel.trtllm.output_tensors import NamedTensor, OutputTensors
from carousel.trtllm.response_board import ResponseBoard
from carousel.trtllm.responses import Response
from runtime.base.errors import CarouselError, ConfigError, InvalidRequest, RequestError, RingClosed
from runtime.wire.stats import batch_manager_record

logger = logging.getLogger(__name__)

TURN_S = 0.005
"""Seconds that a turn waits for responses. New requests and stop signals are noticed as soon."""
COMPLAINT_S = 1.0
"""Seconds between two log lines about a callback that keeps raising."""
STATS_TIMEOUT_S = 1.0
UNBOUNDED = -1
MODEL_TYPES = {
    "V1": "static",
    "InflightBatching": "inflight",
    "InflightFusedBatching": "inflight_fused",
}
"""Value of the setting batching_type by TrtGptModelType."""
POLICIES = ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")

GetInferenceRequests: TypeAlias = Callable[[int], Iterable[InferenceRequest]]
"""Callback that returns up to a number of new requests; if the number is negative, all that there are. It
must not block.
"""
SendResponse: TypeAlias = Callable[[int, list[NamedTensor], bool, str], None]
"""Callback of (request id, output tensors, whether it is the last response, error or "")."""
PollStopSignal: TypeAlias = Callable[[], Collection[int]]
"""Callback that returns ids of requests to stop. Ids that are not in flight have no effect."""
ReturnStats: TypeAlias = Callable[[str], None]
"""Callback that receives statistics as a JSON object."""


@dataclass(slots=True, eq=False)
class ActiveRequest:
    request_id: int
    """Id that the caller chose."""
    executor_id: int
    tensors: OutputTensors
    is_stopping: bool = False


class BatchManager:
    """Batch manager: a thread that calls the callbacks, one at a time. Close it, or use a `with` block."""

    def __init__(
        self,
        executor: GenerationExecutor,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signal: PollStopSignal | None = None,
        return_stats: ReturnStats | None = None,
        *,
        max_num_requests: int | None = None,
    ) -> None:
        """Start the thread. `max_num_requests` is the maximum number of requests in flight; negative: no
        limit. The default is the runtime's max_running_requests.

        Raises: InvalidRequest for 0, RingClosed if the executor has ended.
        """
        if executor.error is not None:
            raise executor.error.with_traceback(None)
        if max_num_requests is None:
            max_num_requests = executor.config.max_running_requests
        if max_num_requests == 0:
            raise InvalidRequest("max_num_requests: above 0, or negative", param="max_num_requests")
        self.max_num_requests = max(max_num_requests, UNBOUNDED)
        self.error: CarouselError | None = None
        """Error that ended the runtime, and with it all requests; None while it runs."""
        self._executor = executor
        self._owns_executor = False
        self._get = get_inference_requests
        self._send = send_response
        self._poll_stop = poll_stop_signal
        self._return_stats = return_stats
        # Its own, so that whoever awaits responses of the executor gets none of these.
        self._board = ResponseBoard(lambda: executor.error)
        self._active: dict[int, ActiveRequest] = {}
        self._by_executor_id: dict[int, ActiveRequest] = {}
        self._iterations = StatsPlace.of_iterations()
        self._quiet_until: dict[str, float] = {}
        self._is_closing = False
        self._is_stopping_all = False
        self._thread = threading.Thread(target=self._run, name="carousel-batch-manager", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        engine_dir: str | Path,
        model_type: str,
        max_beam_width: int,
        scheduler_config: str,
        get_inference_requests: GetInferenceRequests,
        send_response: SendResponse,
        poll_stop_signal: PollStopSignal | None = None,
        return_stats: ReturnStats | None = None,
        *,
        max_num_requests: int | None = None,
        **settings: Any,
    ) -> Self:
        """Start a runtime that ends with this object. The order of the arguments is GptManager's; `settings`
        are those of GenerationExecutor.create.

        Raises: ConfigError for a model_type or scheduler_config that is not in MODEL_TYPES or POLICIES, for
        V1 with another policy than STATIC_BATCH, and for a max_beam_width below 1; otherwise what
        GenerationExecutor.create raises.
        """
        settings |= _batching_settings(model_type, scheduler_config)
        if isinstance(max_beam_width, bool) or not isinstance(max_beam_width, int) or max_beam_width < 1:
            raise ConfigError(f"max_beam_width: {max_beam_width!r} is no width; 1 searches nothing")
        settings["max_beam_width"] = max_beam_width
        executor = GenerationExecutor.create(engine_dir=engine_dir, **settings)
        try:
            manager = cls(
                executor,
                get_inference_requests,
                send_response,
                poll_stop_signal,
                return_stats,
                max_num_requests=max_num_requests,
            )
        except BaseException:
            executor.shutdown()
            raise
        manager._owns_executor = True
        return manager

    def close(self, timeout: float | None = None) -> None:
        """Stop asking for requests, wait for the active ones, then end the thread. Requests that are still
        active after `timeout` seconds are stopped and send their output so far. Idempotent.

        Raises: RuntimeError if a callback calls it, because it would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("close: a callback cannot wait for the end of the thread that calls it")
        self._is_closing = True
        self._thread.join(timeout)
        self._is_stopping_all = True
        self._thread.join()
        if self._owns_executor:
            self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._active or not self._is_closing:
                self._turn()
            self.error = self._executor.error
        except CarouselError as error:
            self.error = error
        except Exception as error:  # a thread that ends in silence would leave every caller waiting
            logger.exception("the batch manager has failed")
            self.error = CarouselError(f"the batch manager has failed: {type(error).__name__}: {error}")
        for request_id in self._active:
            self._send_error(request_id, str(self.error))

    def _turn(self) -> None:
        """Do one iteration. Raises CarouselError if the runtime has ended and all has been sent."""
        if not self._is_closing:
            self._take_in()
        has_worked = bool(self._active)
        for response in self._board.take_any(TURN_S):
            self._respond(response)
        self._stop()
        if has_worked:
            self._report()

    def _take_in(self) -> None:
        num_free = UNBOUNDED
        if self.max_num_requests != UNBOUNDED:
            num_free = self.max_num_requests - len(self._active)
        requests: list[Any] = self._guard("get_inference_requests", lambda: list(self._get(num_free))) or []
        for number, request in enumerate(requests):
            if not isinstance(request, InferenceRequest):
                self._complain(
                    "get_inference_requests", f"gave {type(request).__name__}, no InferenceRequest"
                )
                continue
            try:
                if 0 <= num_free <= number:
                    raise InvalidRequest(f"one more than the {num_free} requests that were asked for")
                self._submit(request)
            except CarouselError as error:
                self._send_error(request.request_id, _words(error))

    def _submit(self, request: InferenceRequest) -> None:
        """Submit a request to the executor. Raises RequestError for an invalid one, RingClosed."""
        request_id = request.request_id
        if request_id in self._active:
            raise InvalidRequest(
                f"duplicate request id {request_id}: the request that has it is in flight and goes on",
                param="request_id",
            )
        config = self._executor.config
        arrays = InputArrays(request.inputs)
        wanted = generation_request(
            arrays,
            has_context=config.gather_context_logits,
            has_generation=config.gather_generation_logits,
        )
        tensors = OutputTensors(wanted, padding_id=padding_id(arrays), max_len=config.context_length)
        result = self._executor.submit(wanted)
        active = ActiveRequest(request_id, wanted.id, tensors)
        self._active[request_id] = self._by_executor_id[wanted.id] = active
        self._board.add(result)

    def _respond(self, response: Response) -> None:
        active = self._by_executor_id[response.request_id]
        if response.is_final:
            # Before the caller hears of it: he may use the id again at once.
            del self._by_executor_id[response.request_id]
            del self._active[active.request_id]
        if response.error is not None:
            self._send_error(active.request_id, _words(response.error))
            return
        tensors = active.tensors.of(response.result)
        self._guard("send_response", lambda: self._send(active.request_id, tensors, response.is_final, ""))

    def _send_error(self, request_id: int, message: str) -> None:
        # No error is told by an empty message.
        self._guard("send_response", lambda: self._send(request_id, [], True, message or "unknown error"))

    def _stop(self) -> None:
        ids = frozenset(self._active) if self._is_stopping_all else self._ids_to_stop()
        for request_id in ids:
            active = self._active.get(request_id)
            if active is not None and not active.is_stopping:
                active.is_stopping = True
                self._executor.abort_request(active.executor_id)

    def _ids_to_stop(self) -> Collection[int]:
        poll = self._poll_stop
        if poll is None:
            return ()
        ids: Collection[int] | None = self._guard("poll_stop_signal", lambda: frozenset(poll()))
        return ids or ()

    def _report(self) -> None:
        """Report one record for each iteration of the runtime since the last turn."""
        report = self._return_stats
        if report is None:
            return
        try:
            records = self._iterations.read(self._executor.ask_stats(STATS_TIMEOUT_S))
        except (RequestError, TimeoutError) as error:
            self._complain("return_stats", f"has nothing to report: {error}")
            return
        except RingClosed:  # the board says it to each request
            return
        for stats in records:
            record = batch_manager_record(stats) | {"Max Request Count": self.max_num_requests}
            text = json.dumps(record)
            self._guard("return_stats", partial(report, text))

    def _guard(self, name: str, call: Callable[[], Any]) -> Any:
        """Return what a callback returns; None if it raises, which is logged and ends nothing."""
        try:
            return call()
        except Exception:
            self._complain(name, "raised", exc_info=True)
            return None

    def _complain(self, name: str, words: str, *, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now >= self._quiet_until.get(name, 0.0):
            self._quiet_until[name] = now + COMPLAINT_S
            logger.error("callback %s %s", name, words, exc_info=exc_info)


def _words(error: CarouselError) -> str:
    """Return an error's message, with arrays named as the caller names them."""
    return str(respelled(error, ARRAY_NAMES) if isinstance(error, RequestError) else error)


def _batching_settings(model_type: str, scheduler_config: str) -> dict[str, str]:
    """Return the settings for GptManager's two arguments. Raises ConfigError that names the wrong one."""
    batching = _one_of("model_type", model_type, MODEL_TYPES)
    policy = _one_of("scheduler_config", scheduler_config, POLICIES)
    if batching == "V1" and policy != "STATIC_BATCH":
        raise ConfigError(f"scheduler_config: V1 batches are closed, which is STATIC_BATCH, not {policy}")
    return {"batching_type": MODEL_TYPES[batching], "capacity_scheduler": policy.lower()}


def _one_of(name: str, value: object, known: Iterable[str]) -> str:
    """Return the known value that `value` spells, ignoring case and underscores. Raises ConfigError."""
    for each in known:
        if _plain(value) == _plain(each):
            return each
    raise ConfigError(f"{name}: {value} is not supported; one of {', '.join(known)} is")


def _plain(value: object) -> str:
    return str(value).replace("_", "").lower()
