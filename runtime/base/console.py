"""Console: standard error, which all processes of a ring share. Writing to it never blocks and never raises.
A full pipe or a stopped terminal costs lines of the log, but does not hold up the server.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

STDERR_FD = 2
# Number of bytes that a writable pipe accepts at once.
MAX_WRITE_BYTES = select.PIPE_BUF
LogFormat: TypeAlias = Literal["text", "json"]
log_context: ContextVar[Mapping[str, str]] = ContextVar("log_context", default=MappingProxyType({}))
"""Extra fields of JSON log lines: the request that is being answered, if there is one."""
_json_process = ""
"""Name of this process if it logs in JSON; otherwise empty."""
NOISY_LIBRARIES = ("httpx", "asyncio", "urllib3", "filelock")


def hold_standard_streams() -> None:
    """Open /dev/null where descriptor 0, 1 or 2 is closed. Otherwise the next file or socket would get its
    number, and log lines would be written into it.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= STDERR_FD:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def write_line(text: str) -> None:
    """Write a line to standard error if it accepts one now: as text, or as the message of a JSON line."""
    if _json_process:
        text = json_line("info", text)
    _write(text)


def _write(text: str, end: str = "\n") -> None:
    data = (text + end).encode(errors="backslashreplace")
    poll = select.poll()
    poll.register(STDERR_FD, select.POLLOUT)
    try:
        while data and poll.poll(0):
            data = data[os.write(STDERR_FD, data[:MAX_WRITE_BYTES]) :]
    except OSError:
        return  # its reader is gone, or its disk is full


def is_terminal() -> bool:
    """Return True if standard error is a terminal on which text can be overwritten."""
    return not _json_process and os.isatty(STDERR_FD)


def write_over(text: str) -> None:
    """Show a text on the terminal's last line, until the next one is written over it."""
    _write(f"\r\x1b[K{text}\r", end="")


def write_error(text: str) -> None:
    """Write the reason why a launch ends, as one line even if the text of a library has several."""
    message = " ".join(line.strip() for line in text.splitlines() if line.strip())
    _write(json_line("error", message) if _json_process else f"error: {message}")


def json_line(level: str, message: str, at_s: float | None = None, **more: object) -> str:
    """Return one line of the log as JSON, in ASCII and without a line break in it."""
    at_s = time.time() if at_s is None else at_s
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))
    said = {"time": f"{whole}.{int(at_s % 1 * 1000):03d}Z", "level": level, "process": _json_process}
    return json.dumps({**said, "message": message, **more})


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        more: dict[str, Any] = {"logger": record.name, **log_context.get()}
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        return json_line(record.levelname.lower(), record.getMessage(), record.created, **more)


class TextFormatter(logging.Formatter):
    """Formatter that spells each second once: a busy server writes thousands of lines in it."""

    def __init__(self, role: str) -> None:
        super().__init__(f"[%(asctime)s {role}] %(message)s", "%Y-%m-%d %H:%M:%S")
        self._second = -1
        self._spelled = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        second = int(record.created)
        if second != self._second:
            self._spelled = super().formatTime(record, datefmt)
            self._second = second
        return self._spelled


class ConsoleHandler(logging.Handler):
    """Handler that writes log records as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write(self.format(record))
        except Exception:
            self.handleError(record)


def configure_logging(role: str, level: str, log_format: LogFormat = "text") -> None:
    handler = ConsoleHandler()
    handler.setFormatter(TextFormatter(role))
    if log_format == "json":
        _write_json_alone(role, handler)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No line has these fields, which were a third of the time that a line takes.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    # The traceback of a record that cannot be formatted would go to standard error, past the handler.
    logging.raiseExceptions = False
    for noisy in NOISY_LIBRARIES:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _write_json_alone(role: str, handler: logging.Handler) -> None:
    """Make all output of this process lines in JSON, including warnings and errors of libraries."""
    global _json_process
    _json_process = role
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(capture=True)
    logger = logging.getLogger(__name__)
    sys.excepthook = lambda kind, error, trace: logger.critical("ended", exc_info=(kind, error, trace))
    threading.excepthook = lambda failed: logger.error(
        "a thread has ended", exc_info=failed.exc_value if failed.exc_value is not None else True
    )
