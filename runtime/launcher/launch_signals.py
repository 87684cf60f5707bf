"""LaunchSignals: the signals that a launcher has received, which wake its loop.

SIGINT and SIGTERM ask for the end of the launch. So does SIGHUP, unless the launch has files of API keys,
which it then reads again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from runtime.base.wake import Wake
from runtime.launcher.children import STOP_SIGNALS


class LaunchSignals:
    def __init__(self, on_stop: Callable[[int], None], *, has_key_files: bool) -> None:
        """Handle signals from now on. on_stop: called by the handler, at any moment, with the number of
        signals that have asked for the end.
        """
        self._on_stop = on_stop
        self.num_stops = 0
        """Number of signals that have asked for the end. More than one ask to hasten it."""
        self.keys_are_due = False
        """True if the API keys are to be read again."""
        self.wake = Wake()
        """Flag that a signal sets, for the poll of the launcher's loop."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        if has_key_files:
            signal.signal(signal.SIGHUP, self._hang_up)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(signal.SIGHUP, self._stop)

    def _stop(self, *_: object) -> None:
        self.num_stops += 1
        self.wake.set()
        self._on_stop(self.num_stops)

    def _hang_up(self, *_: object) -> None:
        self.keys_are_due = True
        self.wake.set()
