"""Random ids, drawn many at a time, because each read of the kernel's random numbers costs as much as twenty
lines of Python.
"""

from __future__ import annotations

import os

ID_BYTES = 16
NUM_DRAWN = 64

_drawn: list[str] = []


def random_id() -> str:
    """Return 32 hexadecimal digits from the kernel's random numbers. No id is returned twice, in
    any thread.
    """
    while True:
        try:
            return _drawn.pop()
        except IndexError:
            digits = os.urandom(ID_BYTES * NUM_DRAWN).hex()
            _drawn.extend(digits[at : at + 2 * ID_BYTES] for at in range(0, len(digits), 2 * ID_BYTES))


# After a fork, the child would otherwise make the same ids.
os.register_at_fork(after_in_child=_drawn.clear)
