"""Ten times as many requests as can be served: the capacity is used, the others are told when to come."""

from __future__ import annotations

from tests.faults.overload import SETTINGS, measure
from tests.harness.ring.launched import launched


def test_overload_costs_no_goodput_and_no_memory_and_refusals_say_when_to_come_back() -> None:
    with launched(*SETTINGS, module="tests.harness.ring.sleeping_worker") as launch:
        report = measure(launch, seconds=4.8, factor=10.0)
        log = launch.log()
    assert set(report["statuses"]) == {200, 503}, report
    assert report["statuses"][503] > report["statuses"][200], report
    assert report["without_retry_after"] == 0
    assert report["rows_used"] > 0.8, report
    # Far from what is promised: answers come 16 at a time, and other work may take most of this machine.
    assert report["goodput_per_s"] > 0.25 * report["unloaded_per_s"], report
    assert report["growth_mb"] < 50, report
    assert "Traceback" not in log
