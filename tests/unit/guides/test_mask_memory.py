"""MaskMemory: what another process sees of it, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runtime.base.mask_memory import MaskMemory

NUM_SLOTS, SLOT_BYTES = 3, 20
ROOT = Path(__file__).resolve().parents[3]
MAKER = """
import sys
from runtime.base.mask_memory import MaskMemory
made = MaskMemory.create(3, 20)
made.write(1, b"\\7" * 20)
print(made.name, flush=True)
sys.stdin.read()
"""


def maker() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_one_writes_the_other_reads() -> None:
    made = MaskMemory.create(NUM_SLOTS, SLOT_BYTES)
    opened = MaskMemory.open(made.name)
    opened.write(2, b"\1\2")
    assert bytes(made.slot(2)) == b"\1\2".ljust(SLOT_BYTES, b"\0")
    made.write(2, b"\xff" * 99)  # of a vocabulary that is larger
    assert bytes(opened.slot(2)) == b"\xff" * SLOT_BYTES
    assert bytes(opened.slot(1)) == bytes(SLOT_BYTES)
    for number in (-1, NUM_SLOTS):
        with pytest.raises(IndexError):
            opened.slot(number)


def test_it_is_read_on_when_its_maker_is_killed_and_then_cannot_be_opened() -> None:
    with maker() as process:
        name = first_line(process)
        opened = MaskMemory.open(name)
        files = {name for name in os.listdir("/dev/shm") if "carousel" in name}
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert bytes(opened.slot(1)) == b"\7" * SLOT_BYTES
    with pytest.raises(FileNotFoundError):
        MaskMemory.open(name)
    assert not files


def test_nobody_can_shorten_what_others_have_mapped() -> None:
    made = MaskMemory.create(NUM_SLOTS, SLOT_BYTES)
    pid, fd, _ = made.name.split(":")
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/{pid}/fd/{fd}", 0)


def test_a_number_that_has_become_another_file_is_not_taken_for_it() -> None:
    """Number of a process, or of a file in it, that was given again."""
    made = MaskMemory.create(NUM_SLOTS, SLOT_BYTES)
    _, _, nonce = made.name.split(":")
    with tempfile.TemporaryFile() as other:
        for content in (b"", b"x" * 4096):
            other.write(content)
            other.flush()
            with pytest.raises(FileNotFoundError):
                MaskMemory.open(f"{os.getpid()}:{other.fileno()}:{nonce}")


def test_the_file_is_closed_with_the_object() -> None:
    made = MaskMemory.create(NUM_SLOTS, SLOT_BYTES)
    path = f"/proc/self/fd/{made.name.split(':')[1]}"
    assert "carousel-masks" in os.readlink(path)
    del made
    assert not os.path.lexists(path) or "carousel-masks" not in os.readlink(path)
