"""The places of a launch, the processes that run as them, and hosts, which start and end those.

A process is named by its place and its epoch, whichever machine it is on: a number of a process means
something on its own machine only.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.ring.process import process_name
from runtime.settings.config import RuntimeConfig

ENGINE_ROLES = ("worker", "scheduler")
"""Roles that hold the state of one engine: when one of them dies, all are started again."""
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Place of a process that a launch has, whichever runs as it at the moment."""

    role: str
    index: int
    name: str
    """Name of the place, for logs and errors."""
    node: int = 0
    """Number of the machine that the place is on."""

    @property
    def unit(self) -> str:
        """Name of what is restarted as one."""
        return ENGINE if self.role in ENGINE_ROLES else self.name


@dataclass(eq=False)
class Child:
    """A process that runs as one of the places."""

    place: ProcessPlace
    epoch: int
    started_at: float = field(default_factory=time.monotonic, kw_only=True)
    is_ready: bool = field(default=False, kw_only=True)

    @property
    def pid(self) -> int:
        """Number of the process on its own machine; 0 while that is not known here."""
        raise NotImplementedError

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped it."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the process; that is then seen like any other end."""
        raise NotImplementedError

    def terminate(self) -> None:
        """Ask the process to end."""
        raise NotImplementedError

    def has_ended(self, timeout_s: float) -> bool:
        """Wait so many seconds for the end of the process. Return whether it has come."""
        raise NotImplementedError

    def is_among(self, fired: Collection[Any]) -> bool:
        """Tell whether a poll that has returned these saw its end."""
        raise NotImplementedError

    def poll(self) -> int | None:
        """Return the exit code of the process, or minus the signal; None while it runs."""
        raise NotImplementedError

    def reap(self) -> int:
        """Wait for the end of the process and let go of it. Returns as `poll`."""
        raise NotImplementedError


class Host(Protocol):
    """A machine on which processes of a launch run."""

    def start(self, place: ProcessPlace, epoch: int) -> Child:
        """Start a process in a place. Raises StartError when there is none to be had."""


def places(config: RuntimeConfig) -> list[ProcessPlace]:
    """Return the places of a launch with resolved settings, in the order in which they are started."""
    indices = {
        # On CUDA rank 0 of the model is in the scheduler's process.
        "worker": range(0 if config.device == "cpu" else 1, config.num_ranks),
        "scheduler": range(1),
        "grammar": range(0 if config.grammar_backend == "none" else 1),
        "detokenizer": range(config.detokenizer_workers),
        "tokenizer": range(config.tokenizer_workers),
        "api": range(0 if config.no_http else config.api_workers),
    }
    return [
        ProcessPlace(
            role,
            index,
            process_name(role, index, config),
            config.node_of_rank(index) if role == "worker" else 0,
        )
        for role, numbers in indices.items()
        for index in numbers
    ]


def describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
