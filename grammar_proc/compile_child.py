"""Parent of the processes that try guides: `python -m grammar_proc.compile_child TOKENIZER BACKEND`, where
TOKENIZER is a directory. Its stdin is a socket.

It reads the vocabulary once. For each socket that it receives it forks a child, which starts at once and ends
with it. The child first sends its process id. Then it reads frames from its socket, each a length and a
Guide, and writes a Compiled for each. The grammar process kills a child whose guide takes too long.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
import warnings
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from grammar_proc.backend import BackendVocabulary
from grammar_proc.guide_grammar import refused
from grammar_proc.guides.guide_memory import allocated_bytes
from grammar_proc.open_backend import open_vocabulary
from grammar_proc.vocabulary import reason_of
from runtime.base.errors import InvalidRequest, RequestError
from runtime.base.parent import die_with_parent
from runtime.wire.error_info import error_info
from runtime.wire.format import Record
from runtime.wire.guide import Guide
from runtime.wire.messages import ErrorInfo

LENGTH = struct.Struct("<I")
PID = struct.Struct("<I")
MAX_GUIDE_BYTES = 64 << 20
"""Memory of a compiled guide at most, in the grammar process. The largest found had 16 MiB."""
MAX_MEMORY = 4 << 30
"""Address space beyond that of the vocabulary and its library. A guide that needs more is refused."""


class Compiled(Record, frozen=True):
    """The grammar of a guide, or the error for which there is none."""

    grammar: str = ""
    error: ErrorInfo | None = None
    num_bytes: int = 0
    """Bytes of memory that it takes, compiled."""


def try_guide(guide: Guide, vocabulary: BackendVocabulary[Any]) -> Compiled:
    """Make the grammar of a guide and check that some output matches it."""
    try:
        guide.validate()
        grammar = vocabulary.grammar_of(guide)
        before = allocated_bytes()
        matcher = vocabulary.compile(grammar)
        num_bytes = max(0, allocated_bytes() - before)
        if not matcher.is_error():
            matcher = vocabulary.after_one(matcher)
        if matcher.is_error():
            raise refused(guide.kind, reason_of(matcher))
        if num_bytes > MAX_GUIDE_BYTES:
            raise InvalidRequest(
                f"the guide is too large: it takes {num_bytes >> 20} MiB of memory, and "
                f"{MAX_GUIDE_BYTES >> 20} at most are possible",
                code="guide_too_large",
            )
    except RequestError as error:
        return Compiled(error=error_info(error))
    except (ValueError, RecursionError, MemoryError) as error:
        return Compiled(error=error_info(refused(guide.kind, str(error) or type(error).__name__)))
    return Compiled(grammar, num_bytes=num_bytes)


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def try_each(vocabulary: BackendVocabulary[Any], source: BinaryIO, sink: BinaryIO) -> None:
    """Answer guides from a stream until it ends."""
    sink.write(frame(PID.pack(os.getpid())))
    while True:
        sink.flush()
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        guide = msgspec.msgpack.decode(source.read(*LENGTH.unpack(head)), type=Guide)
        sink.write(frame(msgspec.msgpack.encode(try_guide(guide, vocabulary))))


def be_child(vocabulary: BackendVocabulary[Any], fd: int, nursery_pid: int) -> NoReturn:
    """Run as a child with the socket `fd`, and end. This process is a fork with a single thread."""
    code = 1
    try:
        die_with_parent(nursery_pid)
        most = _address_space() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        with socket.socket(fileno=fd) as link, link.makefile("rb") as source, link.makefile("wb") as sink:
            try_each(vocabulary, source, sink)
        code = 0
    finally:
        os._exit(code)


def _address_space() -> int:
    """Return the size of this process's address space, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(vocabulary: BackendVocabulary[Any], control: socket.socket) -> None:
    """Fork a child for each socket that arrives, until the other end closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # exit statuses are not needed
    warnings.simplefilter("ignore", DeprecationWarning)  # fork beside a thread that waits for faults
    own_pid = os.getpid()
    gc.collect()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for fd in fds:
            if os.fork() == 0:
                control.close()
                be_child(vocabulary, fd, own_pid)
            os.close(fd)


if __name__ == "__main__":
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a fork that kept it would hide the end of this process
    os.dup2(2, 1)  # for output of libraries
    main(open_vocabulary(sys.argv[2], Path(sys.argv[1]), num_threads=1), control)
