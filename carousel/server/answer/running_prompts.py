"""RunningPrompts: the prompts of one HTTP request while the ring answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from carousel.client.core.request.submission import Submission
from carousel.client.core.streams import AsyncResultStream
from carousel.server.admin.metrics import EndReason, RequestTimer, RequestTimers
from carousel.server.request.cut_prompts import cut_prompts
from carousel.server.request.held_body import STATE, HeldBody
from carousel.server.request.sampling import num_entries
from carousel.server.request.tokenizer import num_chars
from carousel.server.server_state import ServerState
from carousel.server.tracing.tracing import EndedSequence
from runtime.base.errors import RequestError
from runtime.ring.tenants import Tenant

ABORT_RETRY_S = 0.01
PROMPTS_AT_ONCE = 8
"""Number of prompts of a request that are sent in the turn of the event loop in which it has been read."""
BYTES_OF_ENTRY = 16
"""Bytes that a character or an id of a prompt counts for when it is sent (`Entrance`)."""
BYTES_OF_PARAMETER = 64
"""The same for an entry of the sampling parameters' lists, checked for each prompt in up to 1 us."""
MAX_AT_ONCE = 4096
"""Number of these entries up to which several prompts are sent in that turn."""


class RunningPrompts:
    """Prompts of a request by number: what is sent for each, its stream, and whether it was aborted."""

    def __init__(
        self,
        server: ServerState,
        tenant: Tenant,
        submissions: Sequence[Submission],
        state: Mapping[str, Any],
    ) -> None:
        """`submissions` has one request for each prompt, alike except for prompt and label. `state` is that
        of the HTTP request's scope, with the time at which it came and what it holds for its body.
        """
        self.server = server
        self.tenant = tenant
        self.client = server.client.of_tenant(tenant.name)
        self.submissions = list(submissions)
        """Requests of the prompts, without the prompt once its stream is open, which keeps it for itself."""
        self.num_sequences = submissions[0].num_sequences
        """Number of sequences of each prompt, including those that best_of does not select."""
        self._body: HeldBody = state[STATE]
        is_cut = self._body.has_turn
        self.num_chars = 0 if is_cut else sum(num_chars(submission.prompt) for submission in submissions)
        """Number of characters, or ids, of all prompts; 0 if they are to be cut, which leaves few."""
        sampling = submissions[0].sampling
        self._num_entries = num_entries(sampling)
        self.has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.streams: dict[int, AsyncResultStream] = {}
        """Streams of the prompts that have begun."""
        self.aborted: set[int] = set()
        """Prompts whose answers were aborted."""
        self._num_begun = 1
        """Number of prompts that have had their turn (`wait_for_turn`). The first one needs none."""
        self._received_s: float = state["received_s"]

    @property
    def are_embedded(self) -> bool:
        """True if the answer to each is a vector."""
        return self.submissions[0].options.get("task") == "embed"

    @property
    def has_large_parts(self) -> bool:
        """True if the answer has more than text and ids."""
        sampling = self.submissions[0].sampling
        return bool(
            self.has_logprobs
            or self.are_embedded
            or sampling.return_context_logits
            or sampling.return_generation_logits
            or sampling.additional_outputs
        )

    async def cut(self) -> list[Submission]:
        """Cut long prompts that are to be truncated, which frees all but their last ids. Returns the
        requests. They may be aborted meanwhile, because the caller has registered them.
        """
        if self._body.has_turn:
            self.submissions, num_bytes = await cut_prompts(
                self.server, self.submissions, self.tenant.name, self._body.asked_s
            )
            self._body.end_turn(num_bytes)
        return self.submissions

    def open(self, number: int) -> AsyncResultStream:
        """Return the stream of a prompt, which is sent when the stream is first read."""
        submission = self.submissions[number]
        stream = self.streams[number] = self.client.open(submission)
        self.submissions[number] = msgspec.structs.replace(submission, prompt="")
        if number in self.aborted:  # before it was sent
            self._end_early(number)
        return stream

    def timer(self) -> RequestTimer:
        """Return a context in which the times of one prompt are measured."""
        return RequestTimer(self.server.metrics, self._received_s, self.num_sequences)

    def timers(self) -> RequestTimers:
        """Return a context in which the times of all prompts are measured."""
        return RequestTimers([self.timer() for _ in self.submissions])

    def abort(self, prompts: Collection[int]) -> None:
        """End the answers to these prompts early: the caller gets the output so far. Prompts that have not
        begun get none.
        """
        for prompt in prompts:
            if prompt not in self.aborted:
                self.aborted.add(prompt)
                self._end_early(prompt)

    def abort_all(self) -> None:
        """Abort because the caller has left. The time stamps of the sequences still come, with their early
        end.
        """
        self.abort(range(len(self.submissions)))

    def _end_early(self, prompt: int) -> None:
        stream = self.streams.get(prompt)
        if stream is None or prompt >= self._num_begun:
            return
        if stream.state is None:
            # It is about to be submitted. If it were closed now, it would have no end to report.
            asyncio.get_running_loop().call_later(ABORT_RETRY_S, self._end_early, prompt)
        else:
            stream.abort()

    async def wait_for_turn(self, number: int) -> None:
        """Wait until a prompt behind the first ones may be sent: two thousand in one turn of the event loop
        take 30 ms, and more if they are long. Other requests of the tenant wait for one of them at most.
        """
        at_once = min(PROMPTS_AT_ONCE, max(1, MAX_AT_ONCE // max(1, self._num_entries)))
        if number >= at_once:
            num_bytes = BYTES_OF_ENTRY * len(self.submissions[number].prompt)
            num_bytes += BYTES_OF_PARAMETER * self._num_entries
            await self.server.entrance.enter(num_bytes, self.tenant.name)
        self._num_begun = max(self._num_begun, number + 1)
        if number in self.aborted:
            self._end_early(number)

    def end_reasons(self, prompt: int) -> list[EndReason]:
        """Return how each sequence of a prompt has ended, including those that best_of has not selected."""
        state = self.streams[prompt].state
        assert state is not None
        return [sequence.finish_reason or "error" for sequence in state.sequences]

    def ended(self, *, has_content: bool) -> list[EndedSequence]:
        """Return the sequences that have ended, for the request's trace. With content they have texts."""
        return [
            EndedSequence(prompt, sequence.index, sequence.finish, sequence.text if has_content else "")
            for prompt, stream in self.streams.items()
            if stream.state is not None
            for sequence in stream.state.sequences
            if sequence.finish is not None
        ]


def aborted_by_server() -> RequestError:
    """Return the error for an end that the caller did not ask for."""
    return RequestError("the server ended this request early", code="aborted", status=503)
