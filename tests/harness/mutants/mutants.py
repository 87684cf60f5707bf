"""Mistakes seen in the field, or likely with this design. The simulation must detect each of them.

    python -m tests.harness.mutants.mutants [--seeds 60]        hunt all; exit status 1 if one is missed

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
from typing import Any

from scheduler_proc.features.speculation.speculation import SpeculationSettings
from scheduler_proc.waiting.waiting_room import FOR_EVER
from tests.harness.mutants.mutant_table import STEP_MUTANTS, Mutant
from tests.harness.mutants.mutant_table_adapters import ADAPTER_MUTANTS
from tests.harness.mutants.mutant_table_batching import BATCHING_MUTANTS
from tests.harness.mutants.mutant_table_guesses import GUESS_MUTANTS
from tests.harness.mutants.mutant_table_guides import GUIDE_MUTANTS
from tests.harness.mutants.mutant_table_outputs import OUTPUT_MUTANTS
from tests.harness.mutants.mutant_table_pipeline import PIPELINE_MUTANTS
from tests.harness.mutants.mutant_table_processors import PROCESSOR_MUTANTS
from tests.harness.mutants.mutant_table_shares import SHARES_MUTANTS
from tests.harness.mutants.mutant_table_stats import STATS_MUTANTS
from tests.harness.mutants.mutant_table_tenants import TENANT_MUTANTS
from tests.harness.mutants.mutant_table_waiting import WAITING_MUTANTS
from tests.harness.mutants.mutant_table_window import WINDOW_MUTANTS
from tests.harness.simulation import simulation

PLAIN: dict[str, Any] = {
    "window": 0,
    "patience": FOR_EVER,
    "tenants": (),
    "num_tenants": 1,
    "cuts_prompts": True,
    "speculation": SpeculationSettings(),
    "has_adapters": False,
    "guided": 0.0,
    "late": 0.0,
    "num_stages": 1,
}
"""Most shows in a model that sees all of its context, where nobody is in a hurry and prompts are cut; the
rest is for those mistakes that need it.
"""
MUTANTS = [
    *STEP_MUTANTS,
    *ADAPTER_MUTANTS,
    *BATCHING_MUTANTS,
    *GUESS_MUTANTS,
    *GUIDE_MUTANTS,
    *OUTPUT_MUTANTS,
    *PIPELINE_MUTANTS,
    *PROCESSOR_MUTANTS,
    *SHARES_MUTANTS,
    *STATS_MUTANTS,
    *TENANT_MUTANTS,
    *WAITING_MUTANTS,
    *WINDOW_MUTANTS,
]


def edited(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The same function with one phrase changed."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{function.__qualname__} has changed: {old!r} is not in it"
    # A static method is compiled as one again: its source has the decorator.
    space = dict(getattr(function, "__func__", function).__globals__)
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
    """Return what the run of this seed says of the mutant; None when it notices nothing."""
    setting = simulation.setting_of(seed, **PLAIN | dict(mutant.changes)) if mutant.changes else None
    with in_force(mutant):
        try:
            simulation.run(seed, setting, **PLAIN)
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
