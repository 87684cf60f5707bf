"""Turns of tenants, and threads that work for several: whose work comes next, and how much of it may wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

import pytest

from carousel.server.tenancy import fair_threads
from carousel.server.tenancy.fair_threads import SIZE_PER_CALL, FairThreads
from carousel.server.tenancy.fair_turns import FairTurns
from runtime.base.errors import Overloaded, RateLimited
from tests.harness.ring.launched import SLACK

WAIT_S = 5.0 * SLACK


def test_one_tenants_line_is_not_before_anothers_call() -> None:
    done: list[str] = []

    async def main() -> None:
        threads, release = FairThreads(1, "test", lambda: True), threading.Event()

        def call(tenant: str, name: str) -> asyncio.Task[None]:
            return asyncio.create_task(threads.run(tenant, lambda: done.append(name), 1))

        holding = asyncio.create_task(threads.run("alice", lambda: release.wait(WAIT_S), 1))
        calls = [call("alice", f"a{number}") for number in range(20)]
        await asyncio.sleep(0)
        calls += [call("bob", "bob") for _ in range(2)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(holding, *calls)

    asyncio.run(main())
    assert done[:5] == ["a0", "bob", "a1", "bob", "a2"]
    assert [name for name in done if name != "bob"] == [f"a{number}" for number in range(20)]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_who_leaves_keeps_nobody_from_a_thread(num_threads: int) -> None:
    """While it waits, while it works, and in the moment in which it gets a thread."""
    running: list[int] = []

    async def main() -> None:
        threads, release = FairThreads(num_threads, "test", lambda: True), threading.Event()

        def hold() -> None:
            running.append(1)
            assert len(running) <= num_threads, "a thread has one work at a time"
            release.wait(WAIT_S)
            running.pop()

        calls = [asyncio.create_task(threads.run("alice", hold, 1)) for _ in range(6)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        release.set()
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            if threads._turns._num_free:
                for call in calls:
                    call.cancel()
        async with asyncio.timeout(WAIT_S):
            assert await asyncio.gather(*(threads.run("bob", int, 1) for _ in range(8))) == [0] * 8
            while threads._turns._num_free < num_threads:  # a work that nobody waits for ends when it ends
                await asyncio.sleep(0)

    asyncio.run(main())


def test_what_waits_of_one_tenant_is_bounded_and_another_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "MAX_WAITING_CHARS", 16 * SIZE_PER_CALL)

    async def refused(call: Awaitable[bool]) -> type[BaseException]:
        with pytest.raises(Overloaded) as error:
            await call
        return type(error.value)

    async def main() -> None:
        threads, release = FairThreads(1, "test", lambda: True), threading.Event()

        def call(tenant: str, num_calls: int) -> asyncio.Task[bool]:
            chars = (num_calls - 1) * SIZE_PER_CALL
            return asyncio.create_task(threads.run(tenant, lambda: release.wait(WAIT_S), chars))

        waiting = [call("alice", 8), call("alice", 4)]
        await asyncio.sleep(0)
        assert await refused(call("alice", 1)) is RateLimited
        # However much it has: nothing of it waits.
        waiting.append(call("bob", 10))
        await asyncio.sleep(0)
        assert await refused(call("bob", 1)) is RateLimited
        release.set()
        assert all(await asyncio.gather(*waiting))
        assert await call("alice", 100)

    asyncio.run(main())


def test_without_tenants_all_of_it_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "MAX_WAITING_CHARS", 4 * SIZE_PER_CALL)

    async def main() -> None:
        threads, release = FairThreads(1, "test", lambda: False), threading.Event()
        calls = [asyncio.create_task(threads.run("", lambda: release.wait(WAIT_S), 0)) for _ in range(5)]
        await asyncio.sleep(0)
        release.set()
        *found, last = await asyncio.gather(*calls, return_exceptions=True)
        assert found == [True] * 4
        assert type(last) is Overloaded

    asyncio.run(main())


def test_a_call_for_which_no_thread_can_be_started_keeps_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call waited for ever where the system had no more threads for a moment."""

    async def main() -> None:
        threads = FairThreads(1, "test", lambda: True)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(RuntimeError, match="can't start"):
                await threads.run("alice", int, 1)
        async with asyncio.timeout(WAIT_S):
            assert await threads.run("bob", int, 1) == 0

    asyncio.run(main())


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_who_leaves_costs_its_tenant_no_turn() -> None:
    """A tenant that had left four places was passed over four times."""
    taken: list[str] = []

    async def main() -> None:
        turns = FairTurns(1)
        await turns.take("holder")

        async def take(tenant: str, name: str) -> None:
            await turns.take(tenant)
            taken.append(name)

        alice = [asyncio.create_task(take("alice", f"a{number}")) for number in range(5)]
        bob = [asyncio.create_task(take("bob", f"b{number}")) for number in range(5)]
        await asyncio.sleep(0)
        for task in alice[:4]:
            task.cancel()
        await asyncio.sleep(0)
        for _ in range(6):
            turns.pass_on()
            await asyncio.sleep(0)
        await asyncio.gather(*alice, *bob, return_exceptions=True)
        turns.pass_on()
        async with asyncio.timeout(WAIT_S):
            await turns.take("bob")

    asyncio.run(main())
    assert taken == ["a4", "b0", "b1", "b2", "b3", "b4"]


def test_a_turn_that_was_just_given_to_who_leaves_goes_on() -> None:
    async def main() -> None:
        turns = FairTurns(1)
        await turns.take("alice")
        first, second = (asyncio.create_task(turns.take(tenant)) for tenant in ("alice", "bob"))
        await asyncio.sleep(0)
        turns.pass_on()
        first.cancel()
        async with asyncio.timeout(WAIT_S):
            await second

    asyncio.run(main())
