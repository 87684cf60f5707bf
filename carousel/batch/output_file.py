"""OutputFile: the file with the answers of a batch, one line each. A kill loses no line that is whole."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from carousel.batch.lines import WrittenLine, read_written
from runtime.base.errors import ConfigError


class OutputFile:
    """File that lines are appended to, each by one write. One run at a time has it."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Open and lock the file. Raises ConfigError if that fails, or if the file has something in it and
        `resume` is False.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"-o: {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end = os.lseek(self._fd, 0, os.SEEK_END)
        except BlockingIOError:
            os.close(self._fd)
            raise ConfigError(f"-o: {path}: another run is writing it; wait for its end") from None
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"-o: {path}: {error.strerror}; name a file") from None
        if self._end and not resume:
            os.close(self._fd)
            raise ConfigError(f"-o: {path} is not empty; go on with it by --resume, or name another file")

    def read(self) -> Iterator[WrittenLine]:
        """Yield the lines that the file has, and mend the last one: whole JSON gets its line break, and what
        a kill has torn is cut off. Raises ConfigError if a line before it is none of an output.
        """
        whole = number = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for data in iter(file.readline, b""):
                number += 1
                line = read_written(data)
                if not data.endswith(b"\n"):
                    break
                if line is None:
                    raise ConfigError(
                        f"--resume: line {number} of {self.path} is no line of a batch's output"
                    )
                whole += len(data)
                yield line
            else:
                return
        if line is None:
            os.ftruncate(self._fd, whole)
            self._end = whole
        else:
            self.write(b"\n")
            yield line

    def write(self, data: bytes) -> None:
        """Append a line. Raises OSError, with nothing of the line in the file."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Wait until the disk has all lines, and close the file, which ends its lock."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
