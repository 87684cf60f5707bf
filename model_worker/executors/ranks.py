"""Ranks: the scheduler's side of worker processes. Every plan goes to all of them, in order. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from runtime.base.errors import ExecutorError
from runtime.ring.nodes import open_rank_outbox
from runtime.ring.process import ProcessContext
from runtime.wire.format import Message
from runtime.wire.plan import WorkerCommand
from runtime.wire.transport import ZmqOutbox


class Ranks:
    """Sockets to some of the model's ranks, and the state of their processes."""

    def __init__(self, context: ProcessContext, ranks: Iterable[int]) -> None:
        """Find the processes on the status page. Raises ExecutorError if one is gone already. The launcher
        watches ranks on other machines, and ends this process when one dies.
        """
        self._outboxes: list[ZmqOutbox] = []
        self._names: dict[int, str] = {}  # by pidfd
        for rank in ranks:
            name = "the model worker" if context.config.num_ranks == 1 else f"rank {rank} of the model worker"
            if not context.config.node_of_rank(rank):
                try:
                    pidfd = os.pidfd_open(context.status.read("worker", rank).pid)
                except (ProcessLookupError, ValueError) as error:  # ValueError: it had none
                    self.close()
                    raise ExecutorError(f"{name} has died") from error
                self._names[pidfd] = name
            self._outboxes.append(open_rank_outbox(context, rank))

    @property
    def count(self) -> int:
        """Number of these ranks."""
        return len(self._outboxes)

    def register(self, poller: zmq.Poller) -> None:
        """Make a poll return when one of these processes ends."""
        for pidfd in self._names:
            poller.register(pidfd, zmq.POLLIN)

    def died(self, fired: dict[Any, int]) -> str | None:
        """Return the name of a rank that has ended, from the result of a poll; None if none has."""
        return next((name for pidfd, name in self._names.items() if pidfd in fired), None)

    def send(self, message: Message, wait: Callable[[], None], ranks: Sequence[int] | None = None) -> None:
        """Send a message to all ranks, or to these; calls `wait` repeatedly while one of them has no room."""
        for outbox in self._outboxes if ranks is None else [self._outboxes[rank] for rank in ranks]:
            while not outbox.send(message):
                wait()

    def close(self) -> None:
        """Ask the processes to end; they belong to the launcher. May be called again."""
        for outbox in self._outboxes:
            outbox.send(WorkerCommand("shutdown"))
            outbox.close()
        for pidfd in self._names:
            os.close(pidfd)
        self._outboxes, self._names = [], {}
