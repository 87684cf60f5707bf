"""RankProcess: a second rank, in a separate process with its own pretended GPU."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from tests.harness.pretended_gpu import pretended_gpu

ANSWER_S = 120.0


class RankProcess:
    """Does one thing after the other: functions of a module, called with its GPU, its end of the connection,
    and what else is given.
    """

    def __init__(self, device: int, num_devices: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, device, num_devices), daemon=True)
        self.process.start()
        other.close()
        self._is_due = False

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        if self._is_due:
            self._receive()  # of a test that has failed
        self.connection.send((function, args))
        self._is_due = True

    def result(self) -> Any:
        """Return what the function that was started last has returned. Raises AssertionError with what it
        raised.
        """
        assert self._is_due, "nothing was started"
        is_good, value = self._receive()
        assert is_good, f"on the other rank:\n{value}"
        return value

    def _receive(self) -> tuple[bool, Any]:
        if not self.connection.poll(ANSWER_S):
            raise TimeoutError(f"the other rank has not answered within {ANSWER_S:g} s")
        self._is_due = False
        answer: tuple[bool, Any] = self.connection.recv()
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, device: int, num_devices: int) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            with pretended_gpu(num_devices=num_devices) as gpu:
                torch.cuda.set_device(device)
                answer = (True, function(gpu, connection, *args))
        except Exception:  # whatever it is, the other end raises it
            answer = (False, traceback.format_exc())
        connection.send(answer)
