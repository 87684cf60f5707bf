"""Port: everything that comes to the scheduler from outside, and the only module that reads a clock or draws.

    time               read when a turn begins and when something has come that was waited for; in between it
                       stands still
    inbox, outboxes    messages; whether there was room for what was sent
    results of steps   and with each the time at which it came
    adapters           what has become of those that were to be loaded
    masks              of the grammar process, and the time after a wait for them
    readiness          whether what a feature waits for is there
    tenants, clients   the launcher's table; whether one client is connected and no other
    kept adapters      whose weights came with requests: what of them lies in the run directory
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
"""Seconds."""
Rng: TypeAlias = random.Random
SEED_BYTES = 16


class LaunchedStep(Protocol):
    """A launched step, as StepHandle."""

    def result(self) -> StepResult: ...


class AnsweringRanks(Protocol):
    """Ranks of the worker, as CalledRanks."""

    def rank_answers(self) -> Sequence[RankAnswer]: ...


class Readiness(Protocol):
    """Condition that a request waits for, as RequestFeature."""

    def ready(self) -> bool: ...


class Port:
    """Everything that comes to the scheduler from outside. Asked in the scheduler's own thread alone.
    Whatever other threads find out is taken here.
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
        """`outboxes`: one for each detokenizer; `is_client_alone`: whether one client is connected and no
        other; `new_tenants`: as TenantsFile.read_new; `seed`: of the randomness, drawn where none is given.
        `grammar`: where masks come, and `wait_for_grammar` waits for some. `adapters_dir`: where adapters lie
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
        self.read_time()

    # -- time -----------------------------------------------------------------------------------------------

    def read_time(self) -> None:
        """Time goes on to now. Called when a turn begins, and here."""
        self._now_s = self._clock()
        self._wall_s = self._wall_clock()

    def now_s(self) -> float:
        """Return the time of the last reading, on the clock of time.monotonic()."""
        return self._now_s

    def wall_s(self) -> float:
        """Return the same moment, in seconds since 1970."""
        return self._wall_s

    def stopwatch_ns(self) -> int:
        """Return nanoseconds of this very moment, for profiles: no decision may depend on them."""
        return time.monotonic_ns()

    # -- what comes -----------------------------------------------------------------------------------------

    def drain(self, most: int) -> list[ToScheduler]:
        """Return the messages that have come, at most so many."""
        return self._inbox.drain(most)

    def result(self, handle: LaunchedStep) -> StepResult:
        """Wait for a step. Raises ExecutorError when the worker failed or is gone."""
        result = handle.result()
        self.read_time()
        return result

    def adapter_answers(self, device: AdapterDevice) -> Sequence[AdapterLoaded | AdapterFailed]:
        """Return what has become of adapters that were to be loaded."""
        return device.adapter_answers()

    def rank_answers(self, ranks: AnsweringRanks) -> Sequence[RankAnswer]:
        """Return what ranks have answered to calls. Raises ExecutorError when one has died."""
        return ranks.rank_answers()

    def grammar_news(self, wait_s: float) -> list[FromGrammar]:
        """Return what has come from the grammar process; wait so long for it while there is nothing."""
        if self._grammar is None:
            return []
        messages = self._grammar.drain()
        if not messages and wait_s > 0.0:
            self._wait_for_grammar(wait_s)
            messages = self._grammar.drain()
            self.read_time()
        return messages

    def kept_adapters(self) -> list[tuple[str, KeptAdapter]]:
        """Return the kept adapters, by their paths."""
        return [] if self._adapters_dir is None else list(all_kept(self._adapters_dir))

    def kept_adapter(self, path: str) -> KeptAdapter | None:
        """Return the kept adapter at a path; None: there is none."""
        return None if self._adapters_dir is None else read_kept(Path(path))

    def is_inline(self, path: str) -> bool:
        """Tell whether a path is where an adapter that came with a request lies, or lay."""
        return self._adapters_dir is not None and Path(path).parent == kept_in(self._adapters_dir)

    def remove_adapter(self, path: str) -> None:
        """See KeptFiles. Its name is free at once; the files go in a thread, since a disk may be slow."""
        gone = f"{path}.{time.monotonic_ns()}{GONE}"
        try:
            os.rename(path, gone)
        except OSError:
            return
        threading.Thread(target=shutil.rmtree, args=(gone, True), daemon=True).start()

    def is_ready(self, feature: Readiness) -> bool:
        """Tell whether a waiting request may start, by this feature of it. Raises RequestError."""
        return feature.ready()

    def is_client_alone(self) -> bool:
        """Tell whether one client is connected and no other."""
        return self._is_client_alone()

    def new_tenants(self) -> Tenants | None:
        """Return the launcher's table of tenants if it is another than at the last call."""
        return self._new_tenants()

    # -- classes of the user's ------------------------------------------------------------------------------

    def construct(self, cls: Callable[..., Any], *args: object) -> Any:
        """Construct a policy, which gets `clock` (now_s) and `rng` if its constructor names them."""
        given = {"clock": self.now_s, "rng": self.rng}
        names = _names_left(cls, args)
        return cls(*args, **{name: value for name, value in given.items() if name in names})


def _names_left(cls: Callable[..., Any], args: tuple[object, ...]) -> frozenset[str]:
    """Return the parameters of its constructor that the arguments leave to be given by name."""
    try:
        signature = inspect.signature(cls)
        taken = signature.bind_partial(*args).arguments
    except (
        TypeError,
        ValueError,
    ):  # a class in C need not say what it takes; wrong arguments are its to refuse
        return frozenset()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature.parameters.values()
    return frozenset(each.name for each in parameters if each.kind in by_name and each.name not in taken)
