"""Port: everything that comes to the scheduler from outside, and the only module that reads a clock or draws.

    time               read when a turn begins and after each wait; it stands still in between
    inbox, outboxes    messages, and whether there was room for those that were sent
    results of steps   each with the time at which it came
    adapters           results of loading them
    masks              from the grammar process, with the time after a wait for them; and if the worker
                       waits for them, too
    readiness          True if a request's feature lets it start
    tenants, clients   the launcher's table of tenants; True if no more than one client is connected
    kept adapters      adapters whose weights came with requests, in the run directory
    epoch, randomness  given once

Most parts take the time as `port.now_s` and know no port. The same answers of a port make the same plans, in
any process (tests/cpu/scheduler/test_replay.py). The stopwatch is for profiles: nothing is decided by it.
"""

from __future__ import annotations

import inspect
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from runtime.ring.adapters_file import GONE, KeptAdapter, all_kept, kept_in, read_kept
from runtime.ring.process import FIRST_EPOCH
from runtime.ring.tenants import Tenants
from runtime.wire.messages import FromGrammar, ToScheduler
from runtime.wire.plan import AdapterFailed, AdapterLoaded, RankAnswer, StepResult
from runtime.wire.transport import Inbox, Outbox
from scheduler_proc.core.executor import AdapterDevice

Clock: TypeAlias = Callable[[], float]
"""Function that returns seconds."""
Rng: TypeAlias = random.Random
SEED_BYTES = 16


class LaunchedStep(Protocol):
    """A launched step; see StepHandle."""

    def result(self) -> StepResult: ...

    def waits_for_masks(self) -> bool: ...


class AnsweringRanks(Protocol):
    """Ranks of the worker; see CalledRanks."""

    def rank_answers(self) -> Sequence[RankAnswer]: ...


class Readiness(Protocol):
    """Condition that a request or its row waits for; see RequestFeature."""

    def ready(self) -> bool: ...


class Port:
    """Everything that comes to the scheduler from outside. It is used in the scheduler's own thread only;
    results of other threads are taken here.
    """

    def __init__(
        self,
        inbox: Inbox,
        outboxes: Sequence[Outbox],
        epoch: int = FIRST_EPOCH,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
        is_client_alone: Callable[[], bool] = lambda: False,
        new_tenants: Callable[[], Tenants | None] = lambda: None,
        seed: int | None = None,
        grammar: Inbox | None = None,
        wait_for_grammar: Callable[[float], object] = lambda _: None,
        adapters_dir: Path | None = None,
    ) -> None:
        """outboxes: one for each detokenizer. is_client_alone: returns True if at most one client is
        connected. new_tenants: as TenantsFile.read_new. seed: of the random numbers; drawn if none is given.
        grammar: where masks arrive; wait_for_grammar: waits for some. adapters_dir: directory of adapters
        whose weights came with requests.
        """
        self.outboxes = outboxes
        self.epoch = epoch
        self.seed = int.from_bytes(os.urandom(SEED_BYTES), "little") if seed is None else seed
        self.rng = Rng(self.seed)
        self._inbox = inbox
        self._clock = clock
        self._wall_clock = wall_clock
        self._is_client_alone = is_client_alone
        self._new_tenants = new_tenants
        self._grammar = grammar
        self._wait_for_grammar = wait_for_grammar
        self._adapters_dir = adapters_dir
        self.has_looked_for_masks = False
        """True if messages of the grammar process were taken in this turn."""
        self.read_time()

    # -- time -----------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Set the time to now. Called when a turn begins."""
        self.has_looked_for_masks = False
        self.read_time()

    def read_time(self) -> None:
        """Set the time to now."""
        self._now_s = self._clock()
        self._wall_s = self._wall_clock()

    def now_s(self) -> float:
        """Return the time of the last reading, on the clock of time.monotonic()."""
        return self._now_s

    def wall_s(self) -> float:
        """Return the time of the last reading, in seconds since 1970."""
        return self._wall_s

    def stopwatch_ns(self) -> int:
        """Return the current time in nanoseconds, for profiles. No decision may depend on it."""
        return time.monotonic_ns()

    # -- input ----------------------------------------------------------------------------------------------

    def drain(self, most: int) -> list[ToScheduler]:
        """Return the messages that have arrived, at most `most`."""
        return self._inbox.drain(most)

    def result(self, handle: LaunchedStep) -> StepResult:
        """Return the result of a step, waiting for it. Raises ExecutorError when the worker failed or is
        gone.
        """
        result = handle.result()
        self.read_time()
        return result

    def waits_for_masks(self, handle: LaunchedStep) -> bool:
        """Return True if the worker is known to have nothing to compute until the masks of this step come."""
        return handle.waits_for_masks()

    def adapter_answers(self, device: AdapterDevice) -> Sequence[AdapterLoaded | AdapterFailed]:
        """Return the results of loading adapters since the last call."""
        return device.adapter_answers()

    def rank_answers(self, ranks: AnsweringRanks) -> Sequence[RankAnswer]:
        """Return the answers of ranks to calls. Raises ExecutorError when a rank has died."""
        return ranks.rank_answers()

    def grammar_news(self, wait_s: float) -> list[FromGrammar]:
        """Return the messages of the grammar process, waiting up to wait_s for the first one."""
        if self._grammar is None:
            return []
        self.has_looked_for_masks = True
        messages = self._grammar.drain()
        if not messages and wait_s > 0.0:
            self._wait_for_grammar(wait_s)
            messages = self._grammar.drain()
            self.read_time()
        return messages

    def kept_adapters(self) -> list[tuple[str, KeptAdapter]]:
        """Return the kept adapters with their paths."""
        return [] if self._adapters_dir is None else list(all_kept(self._adapters_dir))

    def kept_adapter(self, path: str) -> KeptAdapter | None:
        """Return the kept adapter at a path, or None."""
        return None if self._adapters_dir is None else read_kept(Path(path))

    def is_inline(self, path: str) -> bool:
        """Return True if a path is where an adapter that came with a request is kept, or was."""
        return self._adapters_dir is not None and Path(path).parent == kept_in(self._adapters_dir)

    def remove_adapter(self, path: str) -> None:
        """Remove an adapter's directory. Its name is free at once; the files are removed in a thread, since a
        disk may be slow.
        """
        gone = f"{path}.{time.monotonic_ns()}{GONE}"
        try:
            os.rename(path, gone)
        except OSError:
            return
        threading.Thread(target=shutil.rmtree, args=(gone, True), daemon=True).start()

    def is_ready(self, feature: Readiness) -> bool:
        """Return True if this feature lets its waiting request start, or go on. Raises RequestError."""
        return feature.ready()

    def is_client_alone(self) -> bool:
        """Return True if at most one client is connected."""
        return self._is_client_alone()

    def new_tenants(self) -> Tenants | None:
        """Return the launcher's table of tenants if it has changed since the last call, else None."""
        return self._new_tenants()

    # -- users' classes -------------------------------------------------------------------------------------

    def construct(self, cls: Callable[..., Any], *args: object) -> Any:
        """Construct a policy. It gets `clock` (now_s) and `rng` if its constructor names them."""
        given = {"clock": self.now_s, "rng": self.rng}
        names = _names_left(cls, args)
        return cls(*args, **{name: value for name, value in given.items() if name in names})


def _names_left(cls: Callable[..., Any], args: tuple[object, ...]) -> frozenset[str]:
    """Return the constructor's parameters that these positional arguments leave open."""
    try:
        signature = inspect.signature(cls)
        taken = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):
        # A class in C need not declare its arguments. It refuses wrong ones itself.
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature.parameters.values()
    return frozenset(each.name for each in parameters if each.kind in by_name and each.name not in taken)
