"""`python -m tests.harness.process_facts END ARGUMENT ...` writes what it has received from its parent, as
JSON, and ends. END is its exit code, or minus a signal; "never" waits for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any


def facts() -> dict[str, Any]:
    """Return what this process finds."""
    return {
        "name": __name__,
        "arguments": sys.argv[1:],
        # A new Python may set one for itself where the locale is C.
        "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
        "directory": os.getcwd(),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
        "files": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)],
        "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "num_threads": len(os.listdir("/proc/self/task")),
        "group": os.getpgid(0),
        "session": os.getsid(0),
    }


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
    end = sys.argv[1]
    if end == "never":
        signal.pause()
    if (code := int(end)) < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
