"""Mistakes seen in the field, or invited by this layout: the simulation must notice every one of them.

    python -m tests.mutants [--seeds 60]        hunt all; exit status 1 if one is missed

Each mutant is one function with one phrase changed, in force while the simulation runs.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scheduler_proc.batch import LooseResults, ScheduleBatch
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.radix_cache import RadixCache
from scheduler_proc.features.logprobs import Logprobs
from scheduler_proc.intake import Intake, Tombstones
from scheduler_proc.lifecycle import Lifecycle
from scheduler_proc.output import Output
from scheduler_proc.prefill_adder import PrefillAdder
from scheduler_proc.request import Request
from scheduler_proc.rows import Rows
from scheduler_proc.scheduler import Scheduler
from tests import simulation
from tests.fakes import FakeExecutor


@dataclass(slots=True, frozen=True)
class Mutant:
    name: str
    owner: type
    attribute: str
    old: str
    """A phrase of the function's source, which `new` stands in for."""
    new: str
    seed: int
    """A run that catches it soon; `python -m tests.mutants` finds another when the traffic has changed."""
    jitter: float = 0.0
    """Seconds that the worker is late: some mistakes show only when it is."""


MUTANTS = [
    Mutant(
        "duplicates freed, row still reads them", KVCacheManager, "_repoint", "mine[:] = pages", "pass", 3
    ),
    Mutant(
        "repointing not told to the device", KVCacheManager, "_repoint", "self._changed(row, at)", "pass", 3
    ),
    Mutant("duplicates never freed", KVCacheManager, "_repoint", "self.pages.free(mine)", "pass", 10),
    Mutant(
        "tables written when launched, not on the stream",
        FakeExecutor,
        "launch",
        "handle = FakeHandle()",
        "handle = FakeHandle(); self.apply_tables(plan)",
        6,
        jitter=0.002,
    ),
    Mutant(
        "overrun of a finished request kept",
        Rows,
        "still_held",
        "self.tenancy[rows] == tenancies",
        "rows >= 0",
        6,
    ),
    Mutant(
        "a result given to the row's next tenant",
        Rows,
        "still_held",
        "self.tenancy[rows] == tenancies",
        "self.tenancy[rows] > 0",
        10,
    ),
    Mutant("scheduled before its token is there", Rows, "ready", "ready &= in_flight == 0", "pass", 5),
    Mutant("decodes past the length limit", Rows, "ready", " & (predicted < self.max_len[rows])", "", 3),
    Mutant(
        "features ignored by the decode lane", Rows, "plain_decodes", " & ~self.needs_python[rows]", "", 0
    ),
    Mutant("a token in flight taken for a known one", Rows, "next_ids", "= unknown", "= 1", 3),
    Mutant(
        "only the first stop id tested",
        Rows,
        "append_one",
        "self.stop_ids[:, rows]",
        "self.stop_ids[:1, rows]",
        10,
    ),
    Mutant(
        "length limit not tested", Rows, "append_one", "stopped | (at >= self.max_len[rows])", "stopped", 1
    ),
    Mutant(
        "a row's setup not told to the device", Rows, "take_setups", "tuple(self._setups.values())", "()", 10
    ),
    Mutant(
        "retraction forgets the output",
        Rows,
        "release",
        "req.tokens.tobytes()",
        "req.tokens[: req.num_prompt].tobytes()",
        10,
    ),
    Mutant(
        "penalties forget the output",
        Request,
        "row_setup",
        "self.parked if penalised",
        "self.parked[: 4 * self.num_prompt] if penalised",
        1,
    ),
    Mutant(
        "min_tokens not told to the device",
        Request,
        "row_setup",
        "self.min_len,",
        "0,",
        0,
    ),
    Mutant("guesses kept past the end", Request, "cut", "return tokens[: i + 1]", "return tokens", 9),
    Mutant("page boundary off by one", KVCacheManager, "try_reserve_next", ">= have", "> have", 6),
    Mutant(
        "growth not told to the device",
        KVCacheManager,
        "try_reserve_next",
        "np.minimum(self._dirty_from[rows], have)",
        "self._dirty_from[rows]",
        6,
    ),
    Mutant("a hit on the whole prompt", KVCacheManager, "match", "num_tokens - 1", "num_tokens", 14),
    Mutant("namespaces share pages", KVCacheManager, "match", "req.namespace", "b''", 0),
    Mutant(
        "tokens in flight published",
        KVCacheManager,
        "publish",
        "min(rows.kv_len.item(row), rows.num_tokens.item(row))",
        "rows.kv_len.item(row)",
        38,
    ),
    Mutant("private pages leaked at the end", KVCacheManager, "release", "self.pages.free(", "len(", 0),
    Mutant("lease kept at the end", KVCacheManager, "release", "self.cache.unlock(req.lease)", "pass", 2),
    Mutant(
        "waiters outlive the row they wait for",
        KVCacheManager,
        "release",
        "self._withdraw(req, req.computes)",
        "pass",
        2,
    ),
    Mutant(
        "fork without the copy of its last page",
        KVCacheManager,
        "take_page_copies",
        "return copies",
        "return ()",
        0,
    ),
    Mutant(
        "a cached prefix used without a lease",
        PrefillAdder,
        "try_admit",
        "kv.cache.lock(prefix.node)",
        "pass",
        3,
    ),
    Mutant(
        "a page without successors never evicted",
        RadixCache,
        "_take_from",
        "self._nothing_needs(parent)",
        "pass",
        1,
    ),
    Mutant("a split loses the lease", RadixCache, "_split", "top.lock = node.lock", "pass", 3),
    Mutant(
        "an empty namespace kept for ever",
        RadixCache,
        "_nothing_needs",
        "self._roots.pop(node.namespace, None)",
        "pass",
        1,
    ),
    Mutant(
        "prompts published only at the end",
        ScheduleBatch,
        "publish_prefills",
        "kv.publish_prefill(scheduled.req)",
        "pass",
        3,
    ),
    Mutant(
        "rejected guesses kept in the KV length",
        Scheduler,
        "_commit_row",
        "len(ids) - 1",
        "len(scheduled.guesses)",
        4,
    ),
    Mutant(
        "masks made before their tokens are known", Scheduler, "_launch", "self._commit_down_to(0)", "pass", 3
    ),
    Mutant(
        "logprobs of dropped rows not skipped",
        LooseResults,
        "take_next",
        "self._logprob_at += count",
        "self._logprob_at += count if scheduled.req.row >= 0 else 0",
        6,
    ),
    Mutant(
        "logprobs not cut with their tokens",
        Logprobs,
        "accept",
        "len(sampled.ids)",
        "len(sampled.logprobs.chosen)",
        2,
    ),
    Mutant(
        "a retracted request never queued again", Lifecycle, "retract", "self.waiting.add(req)", "pass", 1
    ),
    Mutant(
        "a replaced attempt gets a terminal",
        Lifecycle,
        "replace",
        "self.num_replaced += 1",
        "self.num_replaced += 1; self.output.close(Closed(req.handle, 'abort'))",
        0,
    ),
    Mutant("adapter slots leak", Lifecycle, "_give_back_row", "self.slots.give_back(req.slot)", "pass", 0),
    Mutant(
        "a stale attempt replaces its successor",
        Intake,
        "_take_in",
        "attempt_of(earlier.handle) >= attempt_of(handle)",
        "False",
        1,
    ),
    Mutant(
        "resumed output taken for prompt",
        Intake,
        "_checked",
        "num_prompt = len(message.input_ids) // TOKEN_BYTES",
        "num_prompt = len(message.input_ids + message.output_ids) // TOKEN_BYTES",
        0,
    ),
    Mutant("an abort ends the next attempt too", Intake, "_live", " and req.handle == handle", "", 9),
    Mutant("early aborts forgotten", Tombstones, "try_take", "return ", "return False and ", 19),
    Mutant("refused output lost", Output, "_try_send_refused", "return False", "pass", 0),
    Mutant(
        "newcomers overcommit the pool",
        PrefillAdder,
        "_has_room_for",
        "return num_pages <= self._kv.num_available - self._promised_pages",
        "return True",
        1,
    ),
]


def edited(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The same function with one phrase changed."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{function.__qualname__} has changed: {old!r} is not in it"
    space = dict(function.__globals__)
    exec(compile(source.replace(old, new), f"<mutant of {function.__qualname__}>", "exec"), space)
    mutant: Callable[..., Any] = space[function.__name__]
    return mutant


@contextmanager
def in_force(mutant: Mutant) -> Iterator[None]:
    original = inspect.getattr_static(mutant.owner, mutant.attribute)
    setattr(mutant.owner, mutant.attribute, edited(original, mutant.old, mutant.new))
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.attribute, original)


def try_catch(mutant: Mutant, seed: int) -> BaseException | None:
    """What the run of this seed says of the mutant; None when it notices nothing."""
    setting = simulation.setting_of(seed, jitter=mutant.jitter) if mutant.jitter else None
    with in_force(mutant):
        try:
            simulation.run(seed, setting)
        except Exception as error:
            return error
    return None


def hunt(mutant: Mutant, num_seeds: int) -> int:
    """The first seed that catches it; -1 when none of num_seeds does."""
    for seed in range(num_seeds):
        error = try_catch(mutant, seed)
        if error is not None:
            print(
                f"{mutant.name:45s} seed {seed:3d}: {type(error).__name__} {str(error).splitlines()[:1]}",
                flush=True,
            )
            return seed
    print(f"{mutant.name:45s} MISSED", flush=True)
    return -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=60)
    args = parser.parse_args()
    logging.disable()
    missed = [mutant.name for mutant in MUTANTS if hunt(mutant, args.seeds) < 0]
    print(
        f"{len(MUTANTS) - len(missed)} of {len(MUTANTS)} caught"
        + "".join(f"; missed: {name}" for name in missed)
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
