"""Console: standard error as all processes of a ring share it. Writing to it never blocks and never raises.

What nobody reads is lost: a full pipe or a terminal that is held up costs lines, not a server.
"""

from __future__ import annotations

import logging
import os
import select

STDERR_FD = 2
# What a pipe that can be written takes at once.
MAX_WRITE_BYTES = select.PIPE_BUF
NOISY_LIBRARIES = ("httpx", "asyncio", "urllib3", "filelock")


def hold_standard_streams() -> None:
    """Open /dev/null where descriptor 0, 1 or 2 is closed: the next file or socket
    to be opened would get its number, and then what is written to standard error.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= STDERR_FD:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def write_line(text: str) -> None:
    """Write a line to standard error if it takes one now."""
    data = (text + "\n").encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(STDERR_FD, select.POLLOUT)
    try:
        while data and poll.poll(0):
            data = data[os.write(STDERR_FD, data[:MAX_WRITE_BYTES]) :]
    except OSError:
        return  # its reader is gone, or its disk is full


def write_error(text: str) -> None:
    """Write why a launch ends, on one line whatever a library has put into it."""
    write_line(f"error: {' '.join(line.strip() for line in text.splitlines() if line.strip())}")


class ConsoleHandler(logging.Handler):
    """Log records as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(self.format(record))
        except Exception:
            self.handleError(record)


def configure_logging(role: str, level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"[%(asctime)s {role}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        handlers=[ConsoleHandler()],
        force=True,
    )
    # Of a record that cannot be formatted the traceback would go to standard error, past the handler.
    logging.raiseExceptions = False
    for noisy in NOISY_LIBRARIES:
        logging.getLogger(noisy).setLevel(logging.WARNING)
