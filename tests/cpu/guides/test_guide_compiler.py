"""GuideCompiler over real children: those that hang, starve, do not start, or take long to end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grammar_proc import compiler as compiling
from grammar_proc.children import CompileChild
from grammar_proc.compile_child import Compiled
from grammar_proc.compiler import GuideCompiler, key_of
from runtime.base.errors import Overloaded
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide

TIMEOUT_S = 60.0
SMALL = Guide("regex", "a+")
WIDE = {"type": "object", "properties": {f"k{number}": {} for number in range(4000)}}
"""Takes a second, and is refused."""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuideCompiler]:
    """One that knows its only child to be there, and has little patience."""
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 1.2)
    monkeypatch.setattr(compiling, "MIN_CPU_S", 0.1)
    made = GuideCompiler(str(DEMO_MODEL), num_children=1)
    assert compiled(made, Guide("choice", '["ready"]')).error is None
    yield made
    made.close()


def until(compiler: GuideCompiler, is_over: Callable[[dict[bytes, Compiled]], bool]) -> dict[bytes, Compiled]:
    got: dict[bytes, Compiled] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while not is_over(got):
        assert time.monotonic() < deadline
        got |= dict(compiler.poll())
        select.select(compiler.files, [], [], 0.01)
    return got


def compiled(compiler: GuideCompiler, guide: Guide) -> Compiled:
    compiler.begin(key_of(guide), guide)
    return until(compiler, lambda got: key_of(guide) in got)[key_of(guide)]


def pid_of(compiler: GuideCompiler) -> int:
    """Process of its only child, once that is there."""
    until(compiler, lambda _: any(child.is_ready for child in compiler._children))
    (child,) = compiler._children
    return child.pid


def test_nobody_waits_for_the_end_of_a_child_and_those_that_end_are_bounded(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the loop waits for a process")

    monkeypatch.setattr(compiling, "MIN_CPU_S", 0.0)
    with monkeypatch.context() as slow_end:
        slow_end.setattr(subprocess.Popen, "wait", never)
        slow_end.setattr(CompileChild, "has_ended", property(lambda _: False))  # as at the lowest priority
        os.kill(pid_of(compiler), signal.SIGSTOP)
        result = compiled(compiler, SMALL)
        assert result.error is not None
        assert result.error.code == "guide_too_large"
        assert compiler.refusal(key_of(SMALL)) == result.error
        assert compiled(compiler, Guide("regex", "b+")).error is None  # by the one in its place
        os.kill(pid_of(compiler), signal.SIGSTOP)
        assert compiled(compiler, Guide("regex", "c+")).error is not None
        assert len(compiler._ending) == 2
        last = Guide("regex", "d+")
        compiler.begin(key_of(last), last)
        list(compiler.poll())
        assert not compiler._children
    # As soon as one of them is gone there is room for another.
    assert until(compiler, lambda got: key_of(last) in got)[key_of(last)].error is None


def test_a_guide_that_had_no_processor_is_not_refused_for_good(compiler: GuideCompiler) -> None:
    os.kill(pid_of(compiler), signal.SIGSTOP)
    starved = compiled(compiler, SMALL)
    assert starved.error is not None
    assert (starved.error.status, starved.error.code) == (503, "too_many_guides")
    assert starved.error.retry_after_s > 0
    assert compiler.refusal(key_of(SMALL)) is None
    assert compiled(compiler, SMALL).error is None


def test_who_leaves_has_a_long_compilation_ended_and_costs_a_short_one_no_process(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 30.0)
    pid = pid_of(compiler)
    compiler.begin(key_of(SMALL), SMALL)
    compiler.cancel(key_of(SMALL))
    assert compiled(compiler, Guide("regex", "b+")).error is None
    assert pid_of(compiler) == pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    compiler.begin(key_of(SMALL), SMALL)
    compiler.cancel(key_of(SMALL))
    until(compiler, lambda _: not compiler.is_busy)
    assert time.monotonic() - began < compiling.MAX_COMPILE_S
    assert compiled(compiler, SMALL).error is None
    assert pid_of(compiler) != pid


def test_a_long_guide_gives_way_and_the_next_child_is_a_fork_at_hand(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 30.0)
    nursery = compiler._nursery._process
    assert os.getsid(pid_of(compiler)) == os.getsid(0)  # elsewhere it would give way to nobody here
    long = Guide("json_schema", json.dumps(WIDE))
    for _ in range(2):  # the first may use what guides have in common
        pid = pid_of(compiler)
        compiler.begin(key_of(long), long)
        policies = set()
        while compiler.is_busy:
            list(compiler.poll())
            with contextlib.suppress(ProcessLookupError):
                policies.add(os.sched_getscheduler(pid))
            time.sleep(0.005)
        compiler._refused.clear()
    assert policies == {os.SCHED_OTHER, os.SCHED_IDLE}
    assert compiled(compiler, SMALL).error is None
    assert pid_of(compiler) != pid
    assert os.sched_getscheduler(pid_of(compiler)) == os.SCHED_OTHER
    assert compiler._nursery._process is nursery


def test_a_guide_whose_child_dies_is_tried_once_more(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have died with the process of which it is a fork."""
    key, nursery = key_of(SMALL), compiler._nursery._process
    assert nursery is not None
    os.kill(pid_of(compiler), signal.SIGSTOP)
    compiler.begin(key, SMALL)
    nursery.kill()
    assert until(compiler, lambda got: key in got)[key].error is None
    assert compiler._nursery._process is not nursery
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 30.0)
    long = Guide("json_schema", json.dumps(WIDE))
    compiler.begin(key_of(long), long)
    tried_by: list[int] = []
    while (refusal := compiler.refusal(key_of(long))) is None:
        list(compiler.poll())
        time.sleep(0.01)
        for child in compiler._children:
            if child.key and child.pid not in tried_by:
                tried_by.append(child.pid)
                os.kill(child.pid, signal.SIGKILL)
    assert len(tried_by) == 2
    assert (refusal.status, refusal.code) == (400, "guide_too_large")


def test_who_comes_back_gets_what_was_given_up(compiler: GuideCompiler) -> None:
    key = key_of(SMALL)
    compiler.begin(key, SMALL)
    compiler.cancel(key)
    assert compiled(compiler, SMALL).error is None


def test_children_that_cannot_start_are_tried_again_now_and_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guides are told to come again, and the processor is not kept busy."""
    monkeypatch.setattr(compiling, "MAX_WAIT_S", 2.0)
    monkeypatch.setattr(compiling, "RESTART_S", 0.5)
    started: list[float] = []
    popen = subprocess.Popen.__init__

    def count(self: subprocess.Popen[bytes], *args: object, **options: object) -> None:
        started.append(time.monotonic())
        popen(self, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess.Popen, "__init__", count)
    compiler = GuideCompiler(str(tmp_path), num_children=2)
    try:
        error = compiled(compiler, SMALL).error
    finally:
        compiler.close()
    assert error is not None
    assert (error.status, error.code) == (503, "too_many_guides")
    assert len(started) <= 8


def test_eight_wait_and_one_more_is_told_to_come_again(compiler: GuideCompiler) -> None:
    os.kill(pid_of(compiler), signal.SIGSTOP)
    guides = [Guide("regex", f"a{{{number}}}") for number in range(1, 11)]
    for guide in guides[:9]:
        compiler.begin(key_of(guide), guide)
    with pytest.raises(Overloaded, match="wait to be compiled") as caught:
        compiler.begin(key_of(guides[9]), guides[9])
    assert caught.value.retry_after_s > 0
    got = until(compiler, lambda got: len(got) == 9)
    assert [got[key_of(guide)].error is None for guide in guides[:9]] == [False] + [True] * 8


def test_guides_of_other_tenants_wait_for_none_of_a_flood_but_the_one_that_is_tried(
    compiler: GuideCompiler,
) -> None:
    os.kill(pid_of(compiler), signal.SIGSTOP)
    flood = [Guide("regex", f"a{{{number}}}") for number in range(1, 10)]
    for guide in flood:
        compiler.begin(key_of(guide, "alice"), guide, "alice")
    with pytest.raises(Overloaded):
        compiler.begin(key_of(SMALL, "alice"), SMALL, "alice")
    others = ["bob", "carol", "dora"]
    for tenant in others:
        compiler.begin(key_of(SMALL, tenant), SMALL, tenant)
    order = list(until(compiler, lambda got: len(got) == 12))
    first = key_of(flood[0], "alice")
    assert set(order[:5]) - {key_of(guide, "alice") for guide in flood[1:]} == {
        first,
        *(key_of(SMALL, tenant) for tenant in others),
    }


def test_a_guide_that_takes_long_is_in_the_way_of_its_own_tenant_only(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_COMPILE_S", 30.0)
    os.kill(pid_of(compiler), signal.SIGSTOP)
    long, after = key_of(SMALL, "alice"), key_of(SMALL, "bob")
    compiler.begin(long, SMALL, "alice")
    until(compiler, lambda _: compiler._children[0].key == long)
    compiler._children[0].demote()
    own = key_of(Guide("regex", "b+"), "alice")
    compiler.begin(own, Guide("regex", "b+"), "alice")
    compiler.begin(after, SMALL, "bob")
    got = until(compiler, lambda got: after in got)
    assert own not in got
    assert compiler._children[0].key == long
    assert len(compiler._children) == 2
