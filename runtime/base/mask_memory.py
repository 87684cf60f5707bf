"""MaskMemory: shared memory for the token masks of guided rows.

It has no name in any file system, so the kernel frees it with the last process that has it mapped, however
that process ends. Another process opens it by its name through /proc, which allows only processes of this
user.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref

_HEADER = struct.Struct("<16sQ")
"""Header: a random number, which shows that the memory is the one named, and the number of bytes of a
slot.
"""
_NONCE_BYTES = 16
_ALIGNMENT = 64


class MaskMemory:
    """Shared memory, divided into slots of one size."""

    def __init__(self, memory: mmap.mmap, name: str, slot_bytes: int) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        self._view = memoryview(memory)[_ALIGNMENT:]
        self._stride = _stride(slot_bytes)

    @staticmethod
    def create(num_slots: int, slot_bytes: int) -> MaskMemory:
        """Create the memory. It can be opened while this object exists. Pages are allocated when they are
        first written. Raises OSError.
        """
        fd = os.memfd_create("carousel-masks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _ALIGNMENT + num_slots * _stride(slot_bytes))
        # Sealed, because a process that has it mapped would be killed if it became shorter.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        nonce = os.urandom(_NONCE_BYTES)
        os.pwrite(fd, _HEADER.pack(nonce, slot_bytes), 0)
        made = MaskMemory(mmap.mmap(fd, 0), f"{os.getpid()}:{fd}:{nonce.hex()}", slot_bytes)
        weakref.finalize(made, os.close, fd)
        return made

    @staticmethod
    def open(name: str) -> MaskMemory:
        """Map the memory of another process. Raises OSError if it is gone, for example with its process."""
        pid, number, nonce = name.split(":")
        fd = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            made_by, slot_bytes = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
            if made_by != bytes.fromhex(nonce):
                raise FileNotFoundError("the process that made it has ended")
            return MaskMemory(mmap.mmap(fd, 0), name, slot_bytes)
        finally:
            os.close(fd)

    def slot(self, number: int) -> memoryview:
        """Return the bytes of a slot. Raises IndexError if there is no slot of that number."""
        at = number * self._stride
        if not 0 <= at < len(self._view):
            raise IndexError(f"no slot {number}")
        return self._view[at : at + self.slot_bytes]

    def write(self, number: int, mask: bytes | memoryview) -> None:
        """Write a mask into a slot. Ids beyond the end of the mask are forbidden; ids beyond the slot are in
        no vocabulary.
        """
        slot = self.slot(number)
        size = min(len(mask), len(slot))
        slot[:size] = mask[:size]
        slot[size:] = bytes(len(slot) - size)


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
