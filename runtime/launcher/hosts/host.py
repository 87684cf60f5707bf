"""Interfaces for places of a launch, the processes that run in them, and hosts that start and end processes.
A process is identified by its place and epoch, whichever machine it is on; its pid is only meaningful on its
own machine.
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
"""Roles that hold the state of one engine. When one of them dies, all are started again."""
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Place of a process in a launch, whichever process fills it at the moment."""

    role: str
    index: int
    name: str
    """Name of the place, for logs and errors."""
    node: int = 0
    """Number of the node that the place is on."""

    @property
    def unit(self) -> str:
        """Name of the group of processes that is restarted together."""
        return ENGINE if self.role in ENGINE_ROLES else self.name


@dataclass(eq=False)
class Child:
    """A process that runs in a place."""

    place: ProcessPlace
    epoch: int
    started_at: float = field(default_factory=time.monotonic, kw_only=True)
    is_ready: bool = field(default=False, kw_only=True)

    @property
    def pid(self) -> int:
        """Process id on its own machine; 0 while it is not known here."""
        raise NotImplementedError

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped it."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the process. Its end is then reported like any other."""
        raise NotImplementedError

    def terminate(self) -> None:
        """Ask the process to end."""
        raise NotImplementedError

    def has_ended(self, timeout_s: float) -> bool:
        """Wait up to timeout_s for the end of the process. Returns True if it has ended."""
        raise NotImplementedError

    def is_among(self, fired: Collection[Any]) -> bool:
        """Return True if these results of a poll report its end."""
        raise NotImplementedError

    def poll(self) -> int | None:
        """Return the exit code of the process, or minus the signal; None while it runs."""
        raise NotImplementedError

    def reap(self) -> int:
        """Wait for the end of the process and free its resources. Returns the same as `poll`."""
        raise NotImplementedError


class Host(Protocol):
    """Machine on which processes of a launch run."""

    def start(self, place: ProcessPlace, epoch: int) -> Child:
        """Start a process in a place. Raises StartError if that fails."""


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
