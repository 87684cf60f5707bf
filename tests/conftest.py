"""Fixtures of tests of all kinds."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import pytest

from runtime.base.cpu_isa import hold_back_libraries
from runtime.settings.config import DEMO_MODEL
from runtime.text import tokenizer
from runtime.text.tokenizer import Tokenizer
from tests.harness.http.tls import AUTHORITY
from tests.harness.warm_start import left_behind, use_warm_starts

# Before anything computes. What a test starts inherits it.
hold_back_libraries()
# Each HTTP client reads the authorities that it trusts, needed or not: 18 ms of CPU for the public ones.
os.environ["SSL_CERT_FILE"] = str(AUTHORITY)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cold", action="store_true", help="start each launch as a user does, not as a fork (warm_start.py)"
    )


def pytest_configure(config: pytest.Config) -> None:
    # At its end Triton counts what is left of its own, and complains. Cleanups come in reverse order: this is
    # after the last collections of pytest, which need not walk over everything either.
    config.add_cleanup(gc.unfreeze)
    if not config.getoption("--cold"):
        use_warm_starts()


MANY_MODULES = 100
"""Modules that a test has imported whose objects are worth freezing. LiteLLM makes 0.4 million, over which
each full collection of all later tests went.
"""
_num_modules = 0
"""Modules there were when all was last frozen."""
_has_unfrozen = False
"""True once something has unfrozen all since then."""
_file = ""
"""File of the test that is run."""


def pytest_collection_finish() -> None:
    _freeze()


def pytest_runtest_logstart(nodeid: str) -> None:
    global _file
    before, _file = _file, nodeid.partition("::")[0]
    if len(sys.modules) > _num_modules + MANY_MODULES or (_file != before and _has_unfrozen):
        _freeze()


def _freeze() -> None:
    """Freeze what is there now, which stays to the end: the garbage collector need not walk over it again."""
    global _num_modules, _has_unfrozen
    gc.collect()
    gc.freeze()
    _num_modules, _has_unfrozen = len(sys.modules), False


def _unfreeze(plain: Callable[[], None] = gc.unfreeze) -> None:
    """Do as gc.unfreeze, and note it: counting what is frozen takes milliseconds."""
    global _has_unfrozen
    _has_unfrozen = True
    plain()


vars(gc)["unfreeze"] = _unfreeze


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what has made launches four times as dear without anybody noticing it."""
    if names := sorted(left_behind()):
        terminalreporter.write_line(
            f"Launches were no forks once a test had set {', '.join(names)}: see READ_LATER in warm_start.py",
            yellow=True,
        )


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """The demo model's tokenizer; nobody changes it."""
    return tokenizer.load(DEMO_MODEL)
