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
    # Far from what is promised: other work on this machine may take most of it.
    assert report["goodput_per_s"] > 0.5 * report["unloaded_per_s"], report
    assert report["growth_mb"] < 50, report
    assert "Traceback" not in log
