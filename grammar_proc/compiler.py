"""GuideCompiler: tries guides in children that it kills, a few at a time, and remembers what was refused.

    begin(guide) ──► waiting (8 at most) ──► a child, 3 s at most ──► grammar or refusal

The children have one processor less than there are. One that takes longer than a moment goes on only when
nobody else needs the processor, and is replaced afterwards. So may its end take long, once it is killed:
nobody waits for that, but there are never more than twice as many processes as children.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from grammar_proc.compile_child import LENGTH, Compiled, frame
from runtime.base.environment import child_environment
from runtime.base.errors import InvalidRequest, Overloaded
from runtime.wire.error_info import error_info
from runtime.wire.guide import Guide
from runtime.wire.messages import ErrorInfo

MAX_COMPILE_S = 3.0
MIN_CPU_S = MAX_COMPILE_S / 2
"""A guide that has had less of a processor in that time may be a small one."""
MAX_WAIT_S = 30.0
"""For a child."""
MAX_START_S = 60.0
RESTART_S = 1.0
"""Between a child that could not start and the next."""
MOMENT_S = 0.2
CLOSE_S = 0.2
MAX_WAITING = 8
MAX_REMEMBERED = 256
MAX_CHILDREN = 8
ENTRY = (sys.executable, "-P", "-m", "runtime.launcher.child")
OOM_SCORE = 500
READ_BYTES = 1 << 20
RETRY_AFTER_S = 1.0


def key_of(guide: Guide) -> bytes:
    """Return what equal guides have in common."""
    return hashlib.blake2b(msgspec.msgpack.encode(guide), digest_size=16).digest()


class _Child:
    """One process. It is ready once its empty frame has come."""

    def __init__(self, tokenizer: str) -> None:
        self.process = subprocess.Popen(
            # It ends with this process, and before it when memory is short.
            [*ENTRY, str(os.getpid()), str(OOM_SCORE), "grammar_proc.compile_child", tokenizer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in: IO[bytes] = self.process.stdin
        self.out: IO[bytes] = self.process.stdout
        for pipe in (self._in, self.out):
            os.set_blocking(pipe.fileno(), False)
        self._to_send = b""
        self._received = bytearray()
        self.is_ready = False
        self.is_demoted = False
        self.guide: bytes | None = None
        """Key of what it tries."""
        self.is_wanted = True
        """Somebody waits for that."""
        self.since = time.monotonic()
        """When it began with it, or was started."""
        self._cpu_before_s = 0.0

    @property
    def cpu_s(self) -> float:
        """How long it has had a processor for what it tries."""
        return _cpu_s(self.process.pid) - self._cpu_before_s

    def give(self, key: bytes, guide: Guide, now: float) -> None:
        self.guide, self.is_wanted, self.since = key, True, now
        self._cpu_before_s = _cpu_s(self.process.pid)
        self._to_send = frame(msgspec.msgpack.encode(guide))
        self.pump()

    def pump(self) -> None:
        """Send what there is room for."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._to_send:
                self._to_send = self._to_send[os.write(self._in.fileno(), self._to_send) :]

    def answer(self) -> bytes | None:
        """Return the next frame that has come; None: none yet. Raises EOFError when there will be none."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.out.fileno(), READ_BYTES):
                self._received += data
            raise EOFError
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        data = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return data

    def demote(self) -> None:
        self.is_demoted = True
        with contextlib.suppress(OSError):
            os.sched_setscheduler(self.process.pid, os.SCHED_IDLE, os.sched_param(0))

    def kill(self) -> None:
        """Does not wait: at the lowest priority its memory may take a minute to be given back."""
        self.process.kill()
        for pipe in (self._in, self.out):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class GuideCompiler:
    """Not for several threads."""

    def __init__(self, tokenizer: str, num_children: int = 0) -> None:
        """`tokenizer`: the directory of one; `num_children`: as many as processors but one, where it is 0."""
        most = num_children or max(1, len(os.sched_getaffinity(0)) - 1)
        self._max_children = min(most, MAX_CHILDREN)
        self._tokenizer = tokenizer
        self._children = [_Child(tokenizer)]
        self._ending: list[subprocess.Popen[bytes]] = []
        """Children that were killed."""
        self._start_after = 0.0
        self._waiting: OrderedDict[bytes, tuple[Guide, float]] = OrderedDict()
        """With the time since when."""
        self._refused: OrderedDict[bytes, ErrorInfo] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Something is tried, or waits for it."""
        return bool(self._waiting) or any(child.guide is not None for child in self._children)

    @property
    def files(self) -> list[int]:
        """Return what becomes readable when there is news."""
        return [child.out.fileno() for child in self._children]

    def refusal(self, key: bytes) -> ErrorInfo | None:
        """Return why a guide was refused, if it was and that is remembered."""
        if key in self._refused:
            self._refused.move_to_end(key)
        return self._refused.get(key)

    def begin(self, key: bytes, guide: Guide) -> None:
        """Have a guide tried, unless it is on its way. Raises Overloaded when too many wait."""
        for child in self._children:
            if child.guide == key:
                child.is_wanted = True
                return
        if key in self._waiting:
            return
        # A guide for which a child is free, or can be started, does not wait for others.
        num_idle = self._max_children - sum(child.guide is not None for child in self._children)
        if len(self._waiting) - num_idle >= MAX_WAITING:
            raise _overloaded(f"{MAX_WAITING} guides wait to be compiled already")
        self._waiting[key] = (guide, time.monotonic())
        self._hand_out()

    def cancel(self, key: bytes) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(key, None)
        for child in self._children:
            if child.guide == key:
                child.is_wanted = False  # over in a moment, or killed

    def poll(self) -> Iterator[tuple[bytes, Compiled]]:
        """Return what has been tried since, and kill what takes too long."""
        now = time.monotonic()
        self._ending = [process for process in self._ending if process.poll() is None]
        for child in list(self._children):
            child.pump()
            key = child.guide
            done = self._look(child, now)
            if done is not None and key is not None:
                self._remember(key, done)
                yield key, done
        while self._waiting and now - next(iter(self._waiting.values()))[1] >= MAX_WAIT_S:
            key, _ = self._waiting.popitem(last=False)
            error = _overloaded(f"no process to compile it was free within {MAX_WAIT_S:g} s")
            yield key, Compiled(error=error_info(error))
        self._hand_out()

    def _look(self, child: _Child, now: float) -> Compiled | None:
        """Return what a child says of its guide, or what is to be said of one that it cannot do."""
        try:
            data = child.answer()
        except EOFError:
            if not child.is_ready:
                self._start_after = now + RESTART_S
            self._drop(child)
            return _too_much("it takes too much memory to compile")
        if data is not None and not child.is_ready:
            child.is_ready = True
            return None
        if data is not None:
            child.guide = None
            if child.is_demoted:
                self._drop(child)
            return msgspec.msgpack.decode(data, type=Compiled)
        busy_s = now - child.since
        if child.guide is None:
            if not child.is_ready and busy_s >= MAX_START_S:
                self._drop(child)
        elif busy_s >= MAX_COMPILE_S:
            cpu_s = child.cpu_s
            self._drop(child)
            if cpu_s < MIN_CPU_S:
                error = _overloaded(f"no processor was free to compile it within {MAX_COMPILE_S:g} s")
                return Compiled(error=error_info(error))
            return _too_much(f"it takes more than {MAX_COMPILE_S:g} s to compile")
        elif busy_s >= MOMENT_S and not child.is_wanted:
            self._drop(child)
        elif busy_s >= MOMENT_S and not child.is_demoted:
            child.demote()
        return None

    def _drop(self, child: _Child) -> None:
        child.kill()
        self._children.remove(child)
        self._ending.append(child.process)

    def _hand_out(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if self._waiting and child.is_ready and child.guide is None:
                key, (guide, _) = self._waiting.popitem(last=False)
                child.give(key, guide, now)
        num_starting = sum(not child.is_ready for child in self._children)
        num_children = len(self._children)
        if num_children and len(self._waiting) <= num_starting:
            return
        num_processes = num_children + len(self._ending)
        has_room = num_children < self._max_children and num_processes < 2 * self._max_children
        if has_room and now >= self._start_after:
            self._children.append(_Child(self._tokenizer))

    def _remember(self, key: bytes, result: Compiled) -> None:
        if result.error is not None and result.error.status == InvalidRequest.status:
            self._refused[key] = result.error
            while len(self._refused) > MAX_REMEMBERED:
                self._refused.popitem(last=False)

    def close(self) -> None:
        for child in list(self._children):
            self._drop(child)
        for process in self._ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_S)


def _cpu_s(pid: int) -> float:
    """How long a process has had a processor; 0.0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _overloaded(why: str) -> Overloaded:
    return Overloaded(
        f"the guide: {why}; try again later", code="too_many_guides", retry_after_s=RETRY_AFTER_S
    )


def _too_much(why: str) -> Compiled:
    error = InvalidRequest(f"the guide is too large: {why}", code="guide_too_large")
    return Compiled(error=error_info(error))
