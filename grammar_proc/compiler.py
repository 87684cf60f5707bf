"""GuideCompiler: tries guides in children that it kills, a few at a time, and remembers what came of them.

    compile(guide) ──► waiting (8 at most) ──► a child, 3 s at most ──► grammar or refusal, remembered

The children have one processor less than there are. One that takes longer than a moment goes on only when
nobody else needs the processor, and is replaced afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO

import msgspec

from grammar_proc.compile_child import LENGTH, Compiled, frame
from runtime.base.environment import child_environment
from runtime.base.errors import InvalidRequest, Overloaded
from runtime.wire.error_info import error_info
from runtime.wire.guide import Guide

logger = logging.getLogger(__name__)

MAX_COMPILE_S = 3.0
MAX_START_S = 60.0
MOMENT_S = 0.2
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
        self.since = time.monotonic()
        """When it began with it, or was started."""

    def give(self, key: bytes, guide: Guide, now: float) -> None:
        self.guide, self.since = key, now
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

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
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
        self._waiting: OrderedDict[bytes, Guide] = OrderedDict()
        self._results: OrderedDict[bytes, Compiled] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Something is tried, or waits for it."""
        return bool(self._waiting) or any(child.guide is not None for child in self._children)

    @property
    def files(self) -> list[int]:
        """Return what becomes readable when there is news."""
        return [child.out.fileno() for child in self._children]

    def result(self, key: bytes) -> Compiled | None:
        """Return what became of a guide, if that is remembered."""
        if key in self._results:
            self._results.move_to_end(key)
        return self._results.get(key)

    def begin(self, key: bytes, guide: Guide) -> None:
        """Have a guide tried, unless it is on its way. Raises Overloaded when too many wait."""
        if key in self._waiting or any(child.guide == key for child in self._children):
            return
        # A guide for which a child is free, or can be started, does not wait for others.
        num_idle = self._max_children - sum(child.guide is not None for child in self._children)
        if len(self._waiting) - num_idle >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} guides wait to be compiled already; try again later",
                code="too_many_guides",
                retry_after_s=RETRY_AFTER_S,
            )
        self._waiting[key] = guide
        self._hand_out()

    def cancel(self, key: bytes) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(key, None)
        for child in self._children:
            if child.guide == key:
                self._replace(child)

    def poll(self) -> Iterator[tuple[bytes, Compiled]]:
        """Return what has been tried since, and kill what takes too long."""
        now = time.monotonic()
        for child in list(self._children):
            child.pump()
            key = child.guide
            done = self._look(child, now)
            if done is not None and key is not None:
                self._remember(key, done)
                yield key, done
        self._hand_out()

    def _look(self, child: _Child, now: float) -> Compiled | None:
        """Return what a child says of its guide, or what is to be said of one that it cannot do."""
        try:
            data = child.answer()
        except EOFError:
            self._replace(child)
            return _too_much("it takes too much memory to compile")
        if data is not None and not child.is_ready:
            child.is_ready = True
            return None
        if data is not None:
            child.guide = None
            if child.is_demoted:
                self._replace(child)
            return msgspec.msgpack.decode(data, type=Compiled)
        busy_s = now - child.since
        if child.guide is None:
            if not child.is_ready and busy_s >= MAX_START_S:
                self._replace(child)
        elif busy_s >= MAX_COMPILE_S:
            self._replace(child)
            return _too_much(f"it takes more than {MAX_COMPILE_S:g} s to compile")
        elif busy_s >= MOMENT_S and not child.is_demoted:
            child.demote()
        return None

    def _replace(self, child: _Child) -> None:
        child.end()
        self._children[self._children.index(child)] = _Child(self._tokenizer)

    def _hand_out(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if not self._waiting:
                return
            if child.is_ready and child.guide is None:
                child.give(*self._waiting.popitem(last=False), now)
        num_starting = sum(not child.is_ready for child in self._children)
        if len(self._waiting) > num_starting and len(self._children) < self._max_children:
            self._children.append(_Child(self._tokenizer))

    def _remember(self, key: bytes, result: Compiled) -> None:
        self._results[key] = result
        while len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)

    def close(self) -> None:
        for child in self._children:
            child.end()


def _too_much(why: str) -> Compiled:
    error = InvalidRequest(f"the guide is too large: {why}", code="guide_too_large")
    return Compiled(error=error_info(error))
