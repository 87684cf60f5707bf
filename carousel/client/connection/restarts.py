"""Restarts: tells from what the ring shows of its processes which of them have been replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from runtime.wire.messages import ProcessState, RingStatus

RestartedRole: TypeAlias = Literal["engine", "tokenizer", "detokenizer"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A process, or the engine as a whole, has been replaced by one that is ready."""

    role: RestartedRole
    index: int
    generation: int
    """Its number among those that the connection has seen, from 1."""


class Restarts:
    """Compares what is shown with what was shown before."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[RestartedRole, int], int] = {}
        self.is_whole = True
        """Every process that is known of can serve."""

    def take(self, status: RingStatus) -> list[tuple[RestartedRole, int]]:
        """Who has got ready under another epoch than it had; of whom nothing was known, nothing is new."""
        replaced: list[tuple[RestartedRole, int]] = []
        is_whole = True
        for role, index, process in _processes(status):
            if not process.epoch:
                continue
            is_whole = is_whole and process.is_ready
            known = self._epochs.setdefault((role, index), process.epoch)
            if process.epoch != known and process.is_ready:
                self._epochs[role, index] = process.epoch
                replaced.append((role, index))
        self.is_whole = is_whole
        return replaced


def _processes(status: RingStatus) -> list[tuple[RestartedRole, int, ProcessState]]:
    return [
        ("engine", 0, status.engine),
        *(("tokenizer", index, process) for index, process in enumerate(status.tokenizers)),
        *(("detokenizer", index, process) for index, process in enumerate(status.detokenizers)),
    ]
