"""The recovery period after a process was replaced or a client came back, in which requests are submitted
again.
"""

from __future__ import annotations

from runtime.wire.status_page import StatusPage

# The time that a client waits for a ring with a missing process
# (carousel.client.core.ring_state.RING_TIMEOUT_S).
RECOVERY_S = 120.0


def is_recovering(page: StatusPage, now_ns: int) -> bool:
    """Return True if a process was replaced, or a client came back, less than RECOVERY_S ago. now_ns: time on
    CLOCK_MONOTONIC.
    """
    times = [page.read("detokenizer", index).recovery_ns for index in range(page.counts["detokenizer"])]
    latest_ns = max(page.read("launcher").recovery_ns, *times)
    return bool(latest_ns) and now_ns - latest_ns < RECOVERY_S * 1e9
