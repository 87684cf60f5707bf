"""The status page: a slot for each process, read whole or not at all, and told apart from other builds'."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.ring.ring_status import ring_status
from runtime.wire import status_page
from runtime.wire.status_page import HEADER_BYTES, SLOT_BYTES, VERSION, ProcessStatus, StatusPage

ROOT = Path(__file__).resolve().parents[3]


def test_a_status_page_has_its_disk_space_from_the_start(tmp_path: Path) -> None:
    """Where it was a hole, the first write on a full disk would be a SIGBUS."""
    page = StatusPage(tmp_path / "status", create=True)
    assert (tmp_path / "status").stat().st_blocks > 0
    page.close()


def test_every_process_has_a_slot_that_all_can_read(tmp_path: Path) -> None:
    owner = StatusPage(tmp_path / "status", create=True, counts={"tokenizer": 3, "api": 2})
    reader = StatusPage(tmp_path / "status")
    slots = list(reader.slots())
    assert sorted(slots) == sorted(
        [("launcher", 0), ("scheduler", 0), ("worker", 0), ("grammar", 0)]
        + [("detokenizer", 0), ("api", 0), ("api", 1)]
        + [("tokenizer", index) for index in range(3)]
    )
    for n, (role, index) in enumerate(slots):
        assert reader.read(role, index) == ProcessStatus()
        assert reader.read_epoch(role, index) == 0
        owner.write(
            role,
            ProcessStatus(n + 1, os.getpid(), "ready", 10 + n, tokens_per_s=0.5, num_sent=1 << 40),
            index,
        )
    for n, (role, index) in enumerate(slots):
        status = ProcessStatus(n + 1, os.getpid(), "ready", 10 + n, tokens_per_s=0.5, num_sent=1 << 40)
        assert reader.read(role, index) == status
        assert reader.read_epoch(role, index) == n + 1
    owner.close()
    reader.close()


def test_a_slot_is_decoded_once_for_each_write(tmp_path: Path) -> None:
    """Each HTTP request looks at three slots, at 3 us each, and few of them have changed."""
    owner = StatusPage(tmp_path / "status", create=True)
    reader = StatusPage(tmp_path / "status")
    for number in range(1, 6):
        owner.write("scheduler", ProcessStatus(1, os.getpid(), "ready", number))
        seen = reader.read("scheduler")
        assert seen == ProcessStatus(1, os.getpid(), "ready", number)
        assert reader.read("scheduler") is seen
        assert reader.read("launcher") == ProcessStatus()
    owner.close()
    reader.close()


def test_clients_are_told_a_silent_launchers_last_state(tmp_path: Path) -> None:
    """Over TCP they know no more of it: it may be stopped while everybody serves."""
    page = StatusPage(tmp_path / "status", create=True)
    page.write("launcher", ProcessStatus(1, os.getpid(), "ready", 1))
    page.write("scheduler", ProcessStatus(1, os.getpid(), "ready", time.monotonic_ns()))
    told = ring_status(page)
    assert (told.state, told.engine.is_ready) == ("ready", True)
    page.close()


def test_a_slot_in_the_middle_of_a_write_reads_as_it_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may be held up there, or killed: nobody may take it for absent."""
    page = StatusPage(tmp_path / "status", create=True)
    assert status_page._copy_at(0, 1) + status_page._FIELDS.size <= status_page.SLOT_BYTES
    for number in range(1, 4):
        page.write("scheduler", ProcessStatus(number, 3, "ready"))

        class Interrupted:
            size = status_page._FIELDS.size

            def pack_into(self, buffer: mmap.mmap, at: int, *fields: int) -> None:
                buffer[at : at + self.size // 2] = b"\xff" * (self.size // 2)
                raise InterruptedError

        with monkeypatch.context() as context:
            context.setattr(status_page, "_FIELDS", Interrupted())
            with pytest.raises(InterruptedError):
                page.write("scheduler", ProcessStatus(99, 99, "failed"))
        assert page.read("scheduler") == ProcessStatus(number, 3, "ready")
        assert page.read_epoch("scheduler") == number
        assert page.read("worker") == ProcessStatus()
    page.close()


@pytest.mark.parametrize("num_writes", [1, 2, 3])
def test_a_slot_that_is_written_in_the_middle_of_a_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    page = StatusPage(tmp_path / "status", create=True)
    page.write("worker", ProcessStatus(7, 7, "ready"))
    fields = status_page._FIELDS
    newest = ProcessStatus(7 + num_writes, 7 + num_writes, "ready", num_received=99)

    class Overtaken:
        size, pack_into = fields.size, fields.pack_into
        is_first = True

        def unpack_from(self, buffer: mmap.mmap, at: int) -> tuple[object, ...]:
            first = buffer[at : at + 6]  # the epoch and half of the pid
            if self.is_first:
                self.is_first = False
                for number in range(1, num_writes + 1):
                    page.write("worker", newest._replace(epoch=7 + number, pid=7 + number))
            return fields.unpack(first + buffer[at + 6 : at + self.size])

    monkeypatch.setattr(status_page, "_FIELDS", Overtaken())
    assert page.read("worker") == newest
    page.close()


@pytest.mark.parametrize("num_writes", [1, 2, 3])
def test_an_epoch_that_is_written_in_the_middle_of_its_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    page = StatusPage(tmp_path / "status", create=True)
    page.write("worker", ProcessStatus(7, 7, "ready"))

    class Overtaken:
        unpack_from = status_page._EPOCH.unpack_from
        is_first = True

        def __call__(self, buffer: mmap.mmap, at: int) -> tuple[int]:
            (epoch,) = self.unpack_from(buffer, at)
            if self.is_first:
                self.is_first = False
                for number in range(1, num_writes + 1):
                    page.write("worker", ProcessStatus(7 + number, 7, "ready"))
            return (epoch,)

    monkeypatch.setattr(status_page, "_EPOCH", SimpleNamespace(unpack_from=Overtaken()))
    assert page.read_epoch("worker") == 7 + num_writes
    page.close()


def test_a_page_of_another_build_is_refused_by_its_version(tmp_path: Path) -> None:
    path = tmp_path / "status"
    StatusPage(path, create=True).close()
    with path.open("r+b") as file:
        file.seek(4)
        file.write(struct.pack("<H", VERSION + 1))
    with pytest.raises(ValueError, match=f"version {VERSION + 1}; this build reads version {VERSION}"):
        StatusPage(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 1536, b"CRSP", bytes(range(HEADER_BYTES))],
    ids=["empty", "zeros", "short", "noise"],
)
def test_what_is_no_status_page_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status").write_bytes(content)
    with pytest.raises(ValueError, match=r"status page|empty"):
        StatusPage(tmp_path / "status")


def test_a_page_that_has_lost_a_slot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "status"
    StatusPage(path, create=True, counts={"api": 4}).close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - SLOT_BYTES)
    with pytest.raises(ValueError, match="slots"):
        StatusPage(path)


def test_who_looks_while_a_page_is_made_finds_none_or_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        assert not (tmp_path / "status").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="No space"):
        StatusPage(tmp_path / "status", create=True)
    assert not (tmp_path / "status").exists()
