"""Receipt: the time at which a request arrived, and conversion of the request's own times to the ring's
clock.
"""

from __future__ import annotations

import time
from typing import NamedTuple

# A request that seems to have been on its way for longer than this has a stamp of a wrong clock.
MAX_AGE_S = 3600.0


class Receipt(NamedTuple):
    """One moment on two clocks."""

    monotonic_s: float
    """Time on CLOCK_MONOTONIC, which all processes of the machine share."""
    wall_s: float
    """Time in seconds since 1970."""

    @staticmethod
    def now() -> Receipt:
        return Receipt(time.monotonic(), time.time())

    def arrived_s(self, arrival_time: float) -> float:
        """Return `arrival_time` (seconds since 1970) on CLOCK_MONOTONIC; the time of receipt if it is 0, in
        the future or absurd.
        """
        age_s = self.wall_s - arrival_time
        is_sensible = 0.0 <= age_s <= min(MAX_AGE_S, self.monotonic_s)
        return self.monotonic_s - age_s if is_sensible else self.monotonic_s

    def deadline_s(self, time_limit_ms: int) -> float:
        """Return the time on CLOCK_MONOTONIC at which the time limit is over; 0.0 for 0, which means no
        limit.
        """
        return self.monotonic_s + time_limit_ms / 1000 if time_limit_ms else 0.0
