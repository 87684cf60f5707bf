"""CUDA tensors over the host's memory: torch takes them for tensors on a GPU, and they can be computed with.

An allocation is memory of the host, viewed by any number of device tensors. Each is made through DLPack, the
only way in which torch accepts memory of a device without a check. Each holds a token, and the last one that
goes frees the allocation.

Memory is counted as by torch's caching allocator, except for its segments: freed memory stays with the
process until the cache is emptied, and memory that a recording has used belongs to its pool as long as a
graph exists.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

DL_CUDA = 2
# (type code, bits) of dlpack.h.
DL_TYPES = {
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float8_e4m3fn: (10, 8),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
}
BLOCK_BYTES = 512
"""Bytes that the allocator rounds up to a multiple of."""
POISON = 0xFF
"""Each byte of memory that nobody has written: NaN as a float, -1 as an integer."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.POINTER(_DLTensor)  # a DLManagedTensor begins with it
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


@dataclass(slots=True, eq=False)
class Pool:
    """Memory that the allocator has from the device."""

    graphs: WeakSet[Any] | None = None
    """Those recorded with it; None: there has been none yet."""
    in_use: int = 0
    reserved: int = 0  # bytes, no less than in_use


class Allocation:
    """Memory of a device, of whoever launched on the stream `home` when it was made."""

    def __init__(self, host: Tensor, home: Any, pool: Pool | None = None) -> None:
        """pool: None where nothing is allocated."""
        storage = host.untyped_storage()
        self.storage = storage
        self.begin = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        self.home = home
        self.pool = pool
        self.num_tensors = 0
        self.written: tuple[Any, int] | None = None  # by which stream, at which of its times
        self.read: dict[Any, int] = {}  # last, by stream
        self.recorded: set[Any] = set()  # streams that it waits for before it is used again

    @property
    def of_graph(self) -> bool:
        """True for memory of a graph's own pool: it stays as long as the graph does."""
        return self.pool is not None and self.pool.graphs is not None

    @property
    def is_freed(self) -> bool:
        return self.num_tensors == 0

    def alias(self, dtype: torch.dtype, address: int, size: Any, stride: Any) -> Tensor:
        """The same elements as a tensor of the host."""
        offset = (address - self.begin) // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(self.storage, offset, size, stride)


class Memory:
    """All allocations that a device tensor looks at, and what they take of the device's memory."""

    def __init__(self, capacity: int, on_free: Callable[[Allocation], None]) -> None:
        """capacity: bytes. on_free is called with each allocation that nobody looks at any more."""
        self.capacity = capacity
        self.pool = Pool()
        """Pool of all that is not recorded."""
        self.pools = [self.pool]
        self._on_free = on_free
        self._begins: list[int] = []
        self._allocations: dict[int, Allocation] = {}

    @property
    def num_reserved(self) -> int:
        """Bytes that the device has given."""
        return sum(pool.reserved for pool in self.pools)

    def empty_cache(self) -> None:
        """Give back what is not in use, but for pools that a graph needs."""
        for pool in self.pools:
            if not pool.graphs:
                pool.reserved = pool.in_use

    def _take(self, pool: Pool, num_bytes: int) -> None:
        """Raises OutOfMemoryError as the allocator does: when emptying the cache did not help."""
        growth = pool.in_use + num_bytes - pool.reserved
        if growth > 0 and self.num_reserved + growth > self.capacity:
            self.empty_cache()
            growth = pool.in_use + num_bytes - pool.reserved
            if self.num_reserved + growth > self.capacity:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {num_bytes} bytes of a pretended GPU with "
                    f"{self.capacity}, of which {self.num_reserved} are taken"
                )
        pool.in_use += num_bytes
        pool.reserved = max(pool.reserved, pool.in_use)

    def adopt(self, host: Tensor, home: Any, pool: Pool) -> Tensor:
        """A device tensor over the memory of `host`, which becomes an allocation if it is none yet. Raises
        OutOfMemoryError.
        """
        if host.numel():
            allocation = self.find(host.data_ptr())
            if allocation is None:
                self._take(pool, _in_blocks(host.untyped_storage().nbytes()))
                allocation = Allocation(host, home, pool)
                insort(self._begins, allocation.begin)
                self._allocations[allocation.begin] = allocation
        else:
            allocation = Allocation(host, home)
        return _device_tensor(host, allocation, self._let_go)

    def find(self, address: int) -> Allocation | None:
        """The allocation with that address in it."""
        place = bisect_right(self._begins, address) - 1
        if place < 0:
            return None
        allocation = self._allocations[self._begins[place]]
        return allocation if address < allocation.begin + allocation.num_bytes else None

    def of(self, tensor: Tensor) -> Allocation | None:
        """None: a tensor without elements."""
        if not tensor.numel():
            return None
        allocation = self.find(tensor.data_ptr())
        assert allocation is not None, "a CUDA tensor whose memory is nobody's"
        return allocation

    def host_of(self, tensor: Tensor) -> Tensor:
        """The elements of a device tensor as a tensor of the host."""
        allocation = self.of(tensor)
        if allocation is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return allocation.alias(tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())

    def _let_go(self, allocation: Allocation) -> None:
        allocation.num_tensors -= 1
        if allocation.is_freed and self._allocations.get(allocation.begin) is allocation:
            del self._allocations[allocation.begin]
            self._begins.remove(allocation.begin)
            assert allocation.pool is not None
            allocation.pool.in_use -= _in_blocks(allocation.num_bytes)
            self._on_free(allocation)


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def poison(host: Tensor) -> None:
    """Fill memory that nobody has written."""
    if host.numel():
        torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage()).fill_(POISON)


def _device_tensor(host: Tensor, allocation: Allocation, let_go: Callable[[Allocation], None]) -> Tensor:
    """Return the token's bytes as torch would export a tensor of the host, but with another address. The end
    of the last view ends the token, which is seen by a weak reference: a deleter written in Python would lose
    an exception in flight.
    """
    token = np.empty(1, np.uint8)
    finalize(token, let_go, allocation).atexit = False
    capsule = torch._C._to_dlpack(torch.from_numpy(token))
    dimensions = ctypes.c_int64 * max(1, host.dim())
    shape, strides = dimensions(*host.shape), dimensions(*host.stride())
    exported = _pointer_of(capsule, b"dltensor").contents
    exported.data, exported.byte_offset = host.data_ptr(), 0
    exported.device_type, exported.device_id = DL_CUDA, allocation.home.device
    exported.code, exported.bits = DL_TYPES[host.dtype]
    exported.ndim, exported.shape, exported.strides = host.dim(), shape, strides
    allocation.num_tensors += 1
    return from_dlpack(capsule)


def let_torch_guard_cuda() -> None:
    """Give CUDA tensors the CPU's device guard, which switches nothing, where there is no GPU.

    Torch built for a CPU has no guard for CUDA and refuses to index such a tensor. Torch built for CUDA has
    one that asks the driver.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[1] is None or not torch.cuda.is_available():
        guards[1] = guards[0]
