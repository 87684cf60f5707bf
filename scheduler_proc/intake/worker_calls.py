"""WorkerCalls: open calls to the worker's ranks, which wait for answers. Knows numbers and ranks, no socket.

A call is sent when it is received, behind the plan that was launched last, on every rank. No plan is launched
until the call has ended, so a rank that hangs in a call is named before it delays a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from runtime.base.errors import ExecutorError, InvalidRequest, Overloaded, RequestError
from runtime.ring.tenants import OWNER
from runtime.wire.error_info import error_info
from runtime.wire.messages import ControlRequest
from runtime.wire.plan import CallRank, RankAnswer
from scheduler_proc.core.output import Output, reply_to
from scheduler_proc.port import Port

MAX_OPEN = 16
"""Maximum number of calls that may be open at a time."""


class CalledRanks(Protocol):
    """Executor whose ranks can be called."""

    @property
    def num_ranks(self) -> int: ...

    def call(self, call: CallRank, ranks: Sequence[int]) -> None:
        """Send a call to these ranks, behind the plans launched before. Does not wait for answers."""

    def rank_answers(self) -> Sequence[RankAnswer]:
        """Return the answers received since the last call. Raises ExecutorError if a rank has died
        or failed.
        """


class _Open(NamedTuple):
    request: ControlRequest
    ranks: tuple[int, ...]
    deadline_s: float
    answers: dict[int, RankAnswer]


class WorkerCalls:
    """Open calls to ranks, by number."""

    def __init__(
        self, ranks: CalledRanks | None, output: Output, port: Port, ranks_per_node: int = 0
    ) -> None:
        """Start without calls. ranks: None if no rank can be called. ranks_per_node: 0 for a single node,
        which errors then do not name.
        """
        self._ranks = ranks
        self._output = output
        self._port = port
        self._ranks_per_node = ranks_per_node
        self._open: dict[int, _Open] = {}
        self._num_calls = 0

    @property
    def is_open(self) -> bool:
        """True while a call waits for answers."""
        return bool(self._open)

    def begin(self, request: ControlRequest) -> None:
        """Send the request's call to its ranks. Raises InvalidRequest or Overloaded."""
        call = request.call
        if call is None:
            raise InvalidRequest("collective_rpc: the request has no call", param="method")
        if self._ranks is None:
            raise InvalidRequest(
                "collective_rpc: not built for several CUDA devices",
                code="unsupported",
            )
        num_ranks = self._ranks.num_ranks
        if wrong := [rank for rank in call.ranks if rank >= num_ranks]:
            problem = f"ranks: there is no rank {wrong[0]}; there are {num_ranks}, from 0"
            raise InvalidRequest(problem, param="ranks")
        if len(self._open) == MAX_OPEN:
            raise Overloaded(f"{MAX_OPEN} calls of collective_rpc are waiting for ranks")
        self._num_calls += 1
        ranks = tuple(sorted(call.ranks)) or tuple(range(num_ranks))
        self._open[self._num_calls] = _Open(request, ranks, self._port.now_s() + call.timeout_s, {})
        self._ranks.call(CallRank(self._num_calls, call.method, call.arguments), ranks)

    def take_answers(self) -> None:
        """Reply to calls that have all their answers, and to those that have timed out. If a rank has died,
        reply to every caller and then raise ExecutorError.
        """
        if not self._open:
            return
        assert self._ranks is not None
        try:
            answers = self._port.rank_answers(self._ranks)
        except ExecutorError as error:
            self.fail_all(str(error))
            self._output.flush()
            raise
        for answer in answers:
            if (call := self._open.get(answer.number)) is not None:
                call.answers[answer.rank] = answer
                if len(call.answers) == len(call.ranks):
                    self._reply(self._open.pop(answer.number))
        for number, call in list(self._open.items()):
            if self._port.now_s() >= call.deadline_s:
                del self._open[number]
                self._refuse(call, self._late(call))

    def forget(self, client: int, tenant: str) -> None:
        """Forget the calls of a client that has gone: those of this tenant, or all if it is the owner."""
        for number, call in list(self._open.items()):
            if call.request.client == client and tenant in (OWNER, call.request.tenant):
                del self._open[number]

    def fail_all(self, why: str) -> None:
        """End every open call with an error."""
        for call in self._open.values():
            failed = RequestError(f"{_name(call)}: {why}", code="worker_failed", status=503)
            self._refuse(call, failed)
        self._open.clear()

    def _reply(self, call: _Open) -> None:
        answers = [call.answers[rank] for rank in call.ranks]
        failed = next((answer for answer in answers if answer.error), None)
        if failed is not None:
            text = f"{_name(call)}: rank {self._named(failed.rank)}: {failed.error}"
            self._refuse(call, RequestError(text, code="worker_call_failed"))
            return
        values = [msgspec.json.decode(answer.value) for answer in answers]
        self._output.reply(reply_to(call.request, values))

    def _refuse(self, call: _Open, error: RequestError) -> None:
        self._output.reply(reply_to(call.request, error_info(error), ok=False))

    def _late(self, call: _Open) -> RequestError:
        assert call.request.call is not None
        silent = ", ".join(self._named(rank) for rank in call.ranks if rank not in call.answers)
        text = f"{_name(call)}: no answer from rank {silent} in {call.request.call.timeout_s:g} s"
        return RequestError(text, code="timeout", status=408)

    def _named(self, rank: int) -> str:
        return f"{rank} on node {rank // self._ranks_per_node}" if self._ranks_per_node else str(rank)


def _name(call: _Open) -> str:
    assert call.request.call is not None
    return f"collective_rpc({call.request.call.method!r})"
