"""Probe: a worker extension with the methods that tests of collective_rpc need."""

from __future__ import annotations

import os
import signal
import time

from model_worker.rank_methods import RankView


class Probe:
    def __init__(self, view: RankView) -> None:
        self._view = view
        self._num_calls = 0

    def where(self, *, label: str = "") -> dict[str, object]:
        """Return what this rank knows of itself, and how often it was asked."""
        self._num_calls += 1
        weights = sum(weight.numel() for weight in self._view.model.parameters())  # type: ignore[attr-defined]
        return {"rank": self._view.rank, "label": label, "calls": self._num_calls, "weights": weights}

    def raise_on(self, rank: int) -> int:
        if self._view.rank >= rank:
            raise LookupError(f"nothing here on {self._view.rank}")
        return rank

    def sleep_on(self, rank: int, seconds: float) -> str:
        if self._view.rank == rank:
            time.sleep(seconds)
        return "awake"

    def end_on(self, rank: int) -> None:
        if self._view.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def huge(self) -> str:
        return "x" * (1 << 20)

    def no_json(self) -> object:
        return self

    def _hidden(self) -> None:
        """Not for callers."""
