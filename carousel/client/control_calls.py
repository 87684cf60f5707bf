"""ControlCalls, AsyncControlCalls: calls of a client to the ring itself, such as statistics, snapshots,
profiles and pauses. Client and AsyncClient inherit them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Unpack

from carousel.client.core.control import (
    ControlArguments,
    check_call,
    check_label,
    check_mode,
    check_num_steps,
    check_weights,
    control_result,
    documented_as,
)
from carousel.client.core.mailbox import Mailbox, deadline_after
from carousel.client.core.session import Session
from carousel.client.core.stats import AskNow, AsyncStatsStream, R, StatsOp, StatsPlace, StatsStream
from runtime.wire.messages import ControlOp, PauseMode
from runtime.wire.stats import IterationStats, RequestStatsPerIteration

CONTROL_TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 600.0
"""Seconds in which other weights should be loaded; a launch has as many for its start by default."""
CALL_GRACE_S = 5.0
"""Seconds beyond the timeout of a call to ranks in which the scheduler's answer must arrive."""


class ControlCalls:
    """Calls to the ring itself, in the caller's thread."""

    _session: Session[Mailbox]

    def server_info(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Return the scheduler's settings and totals. Raises RequestError, RingClosed, TimeoutError."""
        return self._control("server_info", timeout)

    def snapshot(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Return the scheduler's present state: rows, the first 128 waiting requests with reasons, pages, and
        the 512 largest nodes of the radix tree. Raises RequestError, RingClosed, TimeoutError.
        """
        return self._control("snapshot", timeout)

    def timeline(self, label: str, *, timeout: float = CONTROL_TIMEOUT_S) -> list[dict[str, Any]]:
        """Return the stamps of each sequence of sampled requests with this label that has ended, if it is
        among the last 1,000. Raises RequestError, RingClosed, TimeoutError.
        """
        deadline, about = deadline_after(timeout, time.monotonic()), {"label": check_label(label)}
        lanes = range(len(self._session.connection.client_ids))
        answers = [_answer(self._session.asking("timeline", lane, **about), deadline) for lane in lanes]
        return [timeline for answer in answers for timeline in answer]

    def timelines(self, *, timeout: float = CONTROL_TIMEOUT_S) -> list[dict[str, Any]]:
        """Return the timelines of all sampled requests: the last 1,000 sequences of each detokenizer. Raises
        RequestError, RingClosed, TimeoutError.
        """
        deadline, found = deadline_after(timeout, time.monotonic()), list[dict[str, Any]]()
        for lane in range(len(self._session.connection.client_ids)):
            page = _answer(self._session.asking("timeline", lane), deadline)
            while page:
                found += page
                page = _answer(self._session.asking("timeline", lane, after=page[-1]["number"]), deadline)
        return found

    def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        """Drop all cached prefixes that no request uses. Raises RequestError, RingClosed, TimeoutError."""
        return self._control("flush_cache", timeout)

    def iteration_stats(self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S) -> list[IterationStats]:
        """Return statistics of the iterations after number `after` that the scheduler still has, the oldest
        first. Raises RequestError (stats_off if it records none), RingClosed, TimeoutError.
        """
        return StatsPlace.of_iterations(after).read(self._ask_stats(timeout))

    def request_stats(
        self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> list[RequestStatsPerIteration]:
        """Return the same as `iteration_stats` for each live request. Only recorded with
        `request_stats_max_iterations`.
        """
        return StatsPlace.of_requests(after).read(self._ask_stats(timeout))

    def watch_stats(self, *, timeout: float | None = None) -> StatsStream:
        """Iterate over the statistics of each iteration as it ends: `for stats in client.watch_stats()`. It
        ends when no iteration has ended for `timeout` seconds. Raises the same errors as `iteration_stats`,
        from the iteration.
        """

        def ask(after: int, timeout: float | None) -> Any:
            deadline = deadline_after(timeout, time.monotonic())
            return _answer(self._session.asking_stats("iteration_stats", after, wait=True), deadline)

        return StatsStream(ask, timeout)

    def _ask_stats(self, timeout: float) -> AskNow:
        deadline = deadline_after(timeout, time.monotonic())
        return lambda op, after: _answer(self._session.asking_stats(op, after), deadline)

    def pause_generation(
        self, mode: PauseMode = "in_place", *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Launch no more steps until `continue_generation`. New requests wait, and nothing is lost; deadlines
        run on.

        mode: treatment of running requests. "in_place": they keep their rows and pages. "retract": they give
        up their pages, so that the whole cache can be flushed. "abort": running and waiting requests end.
        Returns is_paused, num_running, num_waiting. Raises RequestError, RingClosed, TimeoutError.
        """
        return self._control("pause_generation", timeout, mode=check_mode(mode))

    def continue_generation(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Continue after `pause_generation`; no effect otherwise. Returns and raises the same."""
        return self._control("continue_generation", timeout)

    def drop_adapter(self, name: str, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Free the device memory of adapters with this name: num_dropped of them, each as soon as no request
        uses it. A later request for one loads it again. Raises RequestError, RingClosed, TimeoutError.
        """
        return self._control("drop_adapter", timeout, label=check_label(name))

    def update_weights(
        self,
        path: str | Path,
        *,
        weight_version: str = "",
        abort_all_requests: bool = False,
        timeout: float = UPDATE_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Replace the model's weights by those of a checkpoint below the launch's --weights-dir. The
        checkpoint is checked before anything stops. If it cannot be loaded after all, the old weights are.

        Live requests keep their output and continue with the new weights, or all end with reason `abort`. No
        cached prefix is kept. weight_version: name of the weights in outputs; default: the directory's name.
        path: relative to --weights-dir, or absolute, on the server's machine.

        Returns model_path, weight_version and seconds when the new weights serve. Raises RequestError with
        code invalid_weights, weights_not_loaded, or update_in_progress; Forbidden, RingClosed, TimeoutError.
        """
        weights = check_weights(path, weight_version, aborts=abort_all_requests)
        return self._control("update_weights", timeout, weights=weights)

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = CONTROL_TIMEOUT_S,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call a method on every rank of the model worker, or on these, all between the same two steps:
        `ping`, or a method of the launch's --worker-extension-cls. Arguments and results must be JSON values.
        No step runs meanwhile.

        Returns the results in the order of ranks. Raises RequestError with code worker_call_failed (naming
        the first rank that raised, and its error), timeout (naming the ranks that have not answered in
        `timeout` seconds), or worker_failed when a rank has died; RingClosed.
        """
        call = check_call(method, args, kwargs, timeout, ranks)
        deadline = deadline_after(timeout + CALL_GRACE_S, time.monotonic())
        values: list[Any] = _answer(self._session.asking("collective_rpc", call=call), deadline)
        return values

    def start_profile(
        self, num_steps: int | None = None, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Record what scheduler and worker do in the next `num_steps` steps (default: until `stop_profile`,
        at most 10,000) as a Chrome trace for ui.perfetto.dev.

        Returns num_steps, and the name of the file that will be written to the launch's `profile_dir`. Raises
        RequestError (409 while a profile is taken), RingClosed, TimeoutError.
        """
        return self._control("start_profile", timeout, num_steps=check_num_steps(num_steps))

    def stop_profile(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """End the profile. Returns the name of the file, and num_steps in it. Raises the same errors as
        `start_profile`.
        """
        return self._control("stop_profile", timeout)

    def _control(self, op: ControlOp, timeout: float, **about: Unpack[ControlArguments]) -> dict[str, Any]:
        deadline = deadline_after(timeout, time.monotonic())
        answer: dict[str, Any] = _answer(self._session.asking(op, **about), deadline)
        return answer


class AsyncControlCalls:
    """Calls to the ring itself, in an event loop."""

    _tenant: str

    async def _opened(self) -> Session[Mailbox]:
        raise NotImplementedError

    @documented_as(ControlCalls.server_info)
    async def server_info(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        return await self._control("server_info", timeout)

    @documented_as(ControlCalls.snapshot)
    async def snapshot(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        return await self._control("snapshot", timeout)

    @documented_as(ControlCalls.timeline)
    async def timeline(self, label: str, *, timeout: float = CONTROL_TIMEOUT_S) -> list[dict[str, Any]]:
        session, about = await self._opened(), {"label": check_label(label), "tenant": self._tenant}
        found: list[dict[str, Any]] = []
        for lane in range(len(session.connection.client_ids)):
            found += await _await_answer(session.asking("timeline", lane, **about), timeout)
        return found

    @documented_as(ControlCalls.timelines)
    async def timelines(self, *, timeout: float = CONTROL_TIMEOUT_S) -> list[dict[str, Any]]:
        session, found = await self._opened(), list[dict[str, Any]]()
        for lane in range(len(session.connection.client_ids)):
            page: list[dict[str, Any]] = [{"number": 0}]
            while page:
                about = {"after": page[-1]["number"], "tenant": self._tenant}
                page = await _await_answer(session.asking("timeline", lane, **about), timeout)
                found += page
        return found

    @documented_as(ControlCalls.flush_cache)
    async def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        return await self._control("flush_cache", timeout)

    @documented_as(ControlCalls.iteration_stats)
    async def iteration_stats(
        self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> list[IterationStats]:
        return await self._read_stats(StatsPlace.of_iterations(after), timeout)

    @documented_as(ControlCalls.request_stats)
    async def request_stats(
        self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> list[RequestStatsPerIteration]:
        return await self._read_stats(StatsPlace.of_requests(after), timeout)

    def watch_stats(self, *, timeout: float | None = None) -> AsyncStatsStream:
        """Iterate over the statistics of each iteration as it ends: `async for stats in
        client.watch_stats()`. It ends when no iteration has ended for `timeout` seconds. Raises the same
        errors as `iteration_stats`, from the iteration.
        """

        async def ask(after: int, timeout: float | None) -> Any:
            return await self._ask_stats("iteration_stats", after, timeout, wait=True)

        return AsyncStatsStream(ask, timeout)

    async def _read_stats(self, place: StatsPlace[R], timeout: float) -> list[R]:
        records: list[R] = []
        while not place.is_at_end:
            records += place.take(await self._ask_stats(place.op, place.after, timeout))
        return records

    async def _ask_stats(self, op: StatsOp, after: int, timeout: float | None, *, wait: bool = False) -> Any:
        session = await self._opened()
        return await _await_answer(session.asking_stats(op, after, wait=wait, tenant=self._tenant), timeout)

    @documented_as(ControlCalls.pause_generation)
    async def pause_generation(
        self, mode: PauseMode = "in_place", *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        return await self._control("pause_generation", timeout, mode=check_mode(mode))

    @documented_as(ControlCalls.continue_generation)
    async def continue_generation(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        return await self._control("continue_generation", timeout)

    @documented_as(ControlCalls.drop_adapter)
    async def drop_adapter(self, name: str, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        return await self._control("drop_adapter", timeout, label=check_label(name))

    @documented_as(ControlCalls.update_weights)
    async def update_weights(
        self,
        path: str | Path,
        *,
        weight_version: str = "",
        abort_all_requests: bool = False,
        timeout: float = UPDATE_TIMEOUT_S,
    ) -> dict[str, Any]:
        weights = check_weights(path, weight_version, aborts=abort_all_requests)
        return await self._control("update_weights", timeout, weights=weights)

    @documented_as(ControlCalls.collective_rpc)
    async def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = CONTROL_TIMEOUT_S,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        call = check_call(method, args, kwargs, timeout, ranks)
        asking = (await self._opened()).asking("collective_rpc", tenant=self._tenant, call=call)
        values: list[Any] = await _await_answer(asking, timeout + CALL_GRACE_S)
        return values

    @documented_as(ControlCalls.start_profile)
    async def start_profile(
        self, num_steps: int | None = None, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        return await self._control("start_profile", timeout, num_steps=check_num_steps(num_steps))

    @documented_as(ControlCalls.stop_profile)
    async def stop_profile(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        return await self._control("stop_profile", timeout)

    async def _control(
        self, op: ControlOp, timeout: float, **about: Unpack[ControlArguments]
    ) -> dict[str, Any]:
        session = await self._opened()
        answer: dict[str, Any] = await _await_answer(
            session.asking(op, tenant=self._tenant, **about), timeout
        )
        return answer


def _answer(asking: AbstractContextManager[Mailbox], deadline: float | None) -> Any:
    """Return the body of the reply. Raises its error, or TimeoutError at the deadline."""
    with asking as mailbox:
        return control_result(mailbox.take(deadline)[0])


async def _await_answer(asking: AbstractContextManager[Mailbox], timeout: float | None) -> Any:
    """Return the body of the reply. Raises its error, or TimeoutError after `timeout` seconds."""
    async with asyncio.timeout_at(deadline_after(timeout, asyncio.get_running_loop().time())):
        with asking as mailbox:
            return control_result((await mailbox.take_async())[0])
