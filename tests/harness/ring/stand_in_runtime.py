"""StandInRuntime: replacement of an OwnRuntime."""

from __future__ import annotations

from tests.harness.ring.fake_ring import FakeRing


class StandInRuntime:
    """An OwnRuntime whose processes are a fake ring."""

    def __init__(self, ring: FakeRing) -> None:
        self.run_dir = ring.run_dir
        self.num_stops = 0

    def wait_ready(self) -> None:
        """A fake ring is ready from the start."""

    def stop(self) -> None:
        self.num_stops += 1
