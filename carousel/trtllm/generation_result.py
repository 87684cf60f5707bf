"""GenerationResult: the future of one request, usable from any thread and any event loop, and its output.

The I/O thread only puts items into the mailbox. Callers fold them into the request's state. The executor, not
the result, sends aborts, while it exists.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from carousel.client.core.logprobs import PromptLogprobs
from carousel.client.core.mailbox import deadline_after
from carousel.client.core.state.request_state import RequestState
from carousel.client.core.state.sequence_state import SequenceState
from carousel.trtllm.generation_output import Extent, GenerationOutput
from carousel.trtllm.generation_request import GenerationRequest
from carousel.trtllm.responses import Response, response_of, response_of_beams, response_of_hypotheses
from carousel.trtllm.result_mailbox import ResultMailbox
from runtime.base.errors import CarouselError
from runtime.wire.format import FloatArray


class AbortsRequests(Protocol):
    def abort_request(self, request_id: int) -> None:
        """Ask for the early end of a request."""


class GenerationResult:
    """Future of one request, for any thread and any event loop. An executor makes it."""

    def __init__(
        self,
        request: GenerationRequest,
        state: RequestState,
        mailbox: ResultMailbox,
        executor: AbortsRequests,
    ) -> None:
        """Make the result of a submitted request. It holds `executor` weakly, so that it keeps no runtime
        alive.
        """
        self.request = request
        self._state = state
        self._mailbox = mailbox
        self._executor = weakref.ref(executor)
        self.prefix = [] if request.exclude_input_from_output else request.input_token_ids
        """Ids that are put in front of the generated ones."""
        self.lock = threading.Lock()
        """Lock for reading and changing the sequences."""
        self._error_taken = False
        self._taken = [Extent()] * state.asked.n
        """Extent of each sequence that was handed out."""
        self._last_index = -1

    @property
    def streaming(self) -> bool:
        return self.request.streaming

    @property
    def done(self) -> bool:
        """Return True if the end of every sequence was received, or the error that ended them all, whether or
        not anybody has read it. It never becomes False again.
        """
        return self._mailbox.has_failed or self._mailbox.num_ended == len(self._state.sequences)

    @property
    def outputs(self) -> list[GenerationOutput]:
        """Return the outputs, one for each of `n`, as far as they are received. It takes nothing away from an
        iteration. With `best_of` it is empty until all sequences have ended.
        """
        with self.lock:
            self._fold()
            return [self._output(each, index) for index, each in enumerate(self._state.chosen())]

    @property
    def prompt_logprobs(self) -> PromptLogprobs:
        """Return the log-probabilities of the input tokens received so far; the first is None. Empty if they
        were not requested.
        """
        with self.lock:
            self._fold()
            return self._state.sequences[0].prompt_logprobs[:]

    @property
    def context_logits(self) -> FloatArray | None:
        """Return the raw logits [input tokens, vocabulary] float32 received so far; None if there
        are none.
        """
        with self.lock:
            self._fold()
            return self._state.sequences[0].tensor("context_logits")

    @property
    def additional_context_outputs(self) -> dict[str, FloatArray]:
        """Return the additional outputs by name, [input tokens, width] float32, as far as they
        are received.
        """
        with self.lock:
            self._fold()
            return self._state.sequences[0].additional_outputs("context")

    # -- the whole -------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Wait for the end of all sequences. Returns the first or best one, which has the others in its
        `outputs`. It may be called again, and from several threads, and always returns the same.

        `timeout` is in seconds, for the whole wait. The request goes on after it.

        Raises: TimeoutError, or the error that ended the request: RequestError, RingClosed.
        """
        self._mailbox.wait(lambda: self.done, deadline_after(timeout, time.monotonic()))
        return self._final_output()

    async def aresult(self, timeout: float | None = None) -> GenerationOutput:
        """Await the end, like `result`. Cancelling the waiting task does not affect the request or the
        result.
        """
        try:
            async with asyncio.timeout_at(deadline_after(timeout, asyncio.get_running_loop().time())):
                await self._mailbox.wait_async(lambda: self.done)
        except TimeoutError:
            raise TimeoutError("the time limit of the call is over") from None
        return self._final_output()

    def abort(self) -> None:
        """Ask for an early end. The output so far is still delivered, with finish_reason "abort". Idempotent;
        no effect if the executor is gone.
        """
        executor = self._executor()
        if executor is not None:
            executor.abort_request(self.request.id)

    async def aclose(self) -> None:
        """Abort the request: used to close an iteration that was left early."""
        self.abort()

    @property
    def queue(self) -> ResultQueue:
        """Return the queue of this request's responses, in order. An iteration over the result takes from the
        same ones.
        """
        return ResultQueue(self, self._mailbox)

    # -- as it comes -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs as they come, each of one sequence; the last one of a sequence is its finished one.
        What has come in the meantime is one output. Several iterations of one result share the outputs.
        Leaving the iteration early does not stop the request.

        Raises: RuntimeError unless the request is streaming; otherwise what `result` raises.
        """
        return self

    def __next__(self) -> GenerationOutput:
        self._check_streaming()
        while True:
            seen = self._mailbox.num_put
            output = self.take_output()
            if output is not None:
                return output
            if self.is_exhausted:
                raise StopIteration
            self._mailbox.wait(self._mailbox.has_more_than(seen), None)

    def __aiter__(self) -> AsyncIterator[GenerationOutput]:
        return self

    async def __anext__(self) -> GenerationOutput:
        self._check_streaming()
        while True:
            seen = self._mailbox.num_put
            output = self.take_output()
            if output is not None:
                return output
            if self.is_exhausted:
                raise StopAsyncIteration
            await self._mailbox.wait_async(self._mailbox.has_more_than(seen))

    def take_output(self) -> GenerationOutput | None:
        """Take what is new of one sequence without waiting; None if nothing is. Sequences take turns. A
        sequence that is not streamed is new once, when it has ended. The error that ends the request is
        raised once, after everything else.
        """
        with self.lock:
            self._fold()
            index = self._next_index()
            if index is not None:
                return self._take(self._state.chosen()[index], index)
            if not self._error_taken:
                self._error_taken = self._state.error is not None
                self._state.check()
            return None

    def take_response(self) -> Response | None:
        """Return a response with what `take_output` returns or raises; None if nothing is new."""
        request = self.request
        try:
            if self._searches:
                return self._take_beams()
            output = self.take_output()
        except CarouselError as error:
            return Response(request.id, request.client_id, error)
        return None if output is None else response_of(request, output, is_final=self.is_exhausted)

    def num_ready(self) -> int:
        """Return the number of responses that `take_response` would return now."""
        with self.lock:
            self._fold()
            num_errors = int(self._state.error is not None and not self._error_taken)
            num_news = sum(self._has_news(index) for index in range(len(self._taken)))
            return num_errors + (min(1, num_news) if self._searches else num_news)

    @property
    def is_exhausted(self) -> bool:
        """Return True if the last output, or the error, was taken."""
        return self._error_taken or all(taken.is_end for taken in self._taken)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the I/O thread whenever something has come, and once now if it already has."""
        self._mailbox.add_listener(listener)
        if self._mailbox.num_put:
            listener()

    # -- under the lock --------------------------------------------------------------------------------------

    @property
    def _searches(self) -> bool:
        """Return True if the sequences are the beams of one search, which are delivered together."""
        return self._state.request.sampling.num_beams > 1

    @property
    def _chooses(self) -> bool:
        """Return True if more sequences are generated than delivered."""
        return len(self._taken) < len(self._state.sequences)

    def _next_index(self) -> int | None:
        """Return the next sequence with something new, after the one that had its turn last."""
        num_sequences = len(self._taken)
        for step in range(1, num_sequences + 1):
            index = (self._last_index + step) % num_sequences
            if self._has_news(index):
                return index
        return None

    def _has_news(self, index: int) -> bool:
        taken = self._taken[index]
        if taken.is_end:
            return False
        sequence = self._state.sequences[index]
        if self._searches and self.streaming and sequence.num_shown > taken.num_shown:
            return True
        if self._chooses or self._searches:
            return self._state.is_complete
        if sequence.finish_reason is not None:
            return True
        return self.streaming and (
            len(sequence.token_ids) > taken.num_tokens or sequence.num_chars > taken.num_chars
        )

    def _take_beams(self) -> Response | None:
        """Return the response with the result of the search. Raises, once, the error that has ended it."""
        with self.lock:
            self._fold()
            if not any(self._has_news(index) for index in range(len(self._taken))):
                if self._error_taken or self._state.error is None:
                    return None
                self._error_taken = True
                self._state.check()
            if not self._state.is_complete:
                return response_of_hypotheses(self.request, self._take_shown())
            beams = [self._take(each, index) for index, each in enumerate(self._state.chosen())]
        return response_of_beams(self.request, beams, self._state.total_usage())

    def _take_shown(self) -> list[list[int]]:
        """Return all ids of each sequence of a search, as far as it has come."""
        sequences = self._state.sequences
        for index, each in enumerate(sequences):
            self._taken[index] = self._taken[index]._replace(num_shown=each.num_shown)
        return [list(each.token_ids or each.shown_ids) for each in sequences]

    def _take(self, sequence: SequenceState, index: int) -> GenerationOutput:
        output = self._output(sequence, index)
        self._last_index = index
        self._taken[index] = output.extent
        return output

    def _output(self, sequence: SequenceState, index: int) -> GenerationOutput:
        """Return an output with what is new since the last one that was taken."""
        return GenerationOutput(self, sequence, index, self._taken[index])

    def _final_output(self) -> GenerationOutput:
        with self.lock:
            self._fold()
            self._state.check()
            return self._output(self._state.chosen()[0], 0)

    def _fold(self) -> None:
        """Apply the items of the mailbox to the state."""
        items = self._mailbox.take_now()
        if items:
            self._state.receive(items)
            if self._state.error is not None:
                self._state.error = self.request.named(self._state.error)

    def _check_streaming(self) -> None:
        if not self.streaming:
            raise RuntimeError("the request is not streaming: wait for it with result() or aresult()")
        if self._searches:
            raise RuntimeError("what a beam search has so far may change: take the responses of its queue")


class ResultQueue:
    """Responses of one request, for any thread and any event loop: the methods of `queue.Queue` that take
    something out, and `get_async`. It stores nothing itself.
    """

    def __init__(self, result: GenerationResult, mailbox: ResultMailbox) -> None:
        self._result = result
        self._mailbox = mailbox

    def get(self, block: bool = True, timeout: float | None = None) -> Response:
        """Wait for the next response, at most `timeout` seconds.

        Raises: queue.Empty if the time is over, if nothing is there and `block` is False, or if anyone has
        taken the final response.
        """
        deadline = deadline_after(timeout if block else 0.0, time.monotonic())
        while True:
            seen = self._mailbox.num_put
            response = self._take()
            if response is not None:
                return response
            try:
                self._mailbox.wait(self._mailbox.has_more_than(seen), deadline)
            except TimeoutError:
                raise queue.Empty from None

    def get_nowait(self) -> Response:
        """Return the next response, like `get(block=False)`."""
        return self.get(block=False)

    async def get_async(self, timeout: float | None = None) -> Response:
        """Await the next response, like `get`. Cancelling the waiting task takes no response away."""
        try:
            async with asyncio.timeout_at(deadline_after(timeout, asyncio.get_running_loop().time())):
                while True:
                    seen = self._mailbox.num_put
                    response = self._take()
                    if response is not None:
                        return response
                    await self._mailbox.wait_async(self._mailbox.has_more_than(seen))
        except TimeoutError:
            raise queue.Empty from None

    def qsize(self) -> int:
        """Return the number of responses that could be taken now."""
        return self._result.num_ready()

    def empty(self) -> bool:
        """Return True if no response could be taken now."""
        return not self.qsize()

    def _take(self) -> Response | None:
        """Return the next response; None if there is none yet. Raises queue.Empty if there will be none."""
        response = self._result.take_response()
        if response is None and self._result.is_exhausted:
            raise queue.Empty
        return response
