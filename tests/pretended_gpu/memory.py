"""CUDA tensors over the host's memory: torch takes them for tensors on a GPU, and they can be computed with.

An allocation is memory of the host; any number of device tensors look at it, each made through DLPack, the
one door through which torch takes memory of a device on trust. Their deleter says when the last one is gone.
"""

from __future__ import annotations

import atexit
import ctypes
from bisect import bisect_right, insort
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = (
    ("tensor", _DLTensor),
    ("context", ctypes.c_void_p),
    ("deleter", _Deleter),
)

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Allocation:
    """Memory of a device, of whoever launched on the stream `home` when it was made."""

    def __init__(self, host: Tensor, home: Any) -> None:
        storage = host.untyped_storage()
        self.storage = storage
        self.begin = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        self.home = home
        self.num_tensors = 0
        self.written: tuple[Any, int] | None = None  # by which stream, at which of its times
        self.read: dict[Any, int] = {}  # last, by stream
        self.recorded: set[Any] = set()  # streams that it waits for before it is used again
        self.of_graph = False
        """Of a graph's own pool: it stays as long as the graph does."""

    @property
    def is_freed(self) -> bool:
        return self.num_tensors == 0

    def alias(self, dtype: torch.dtype, address: int, size: Any, stride: Any) -> Tensor:
        """The same elements as a tensor of the host."""
        offset = (address - self.begin) // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(self.storage, offset, size, stride)


class Memory:
    """All allocations that a device tensor looks at."""

    def __init__(self, on_free: Callable[[Allocation], None]) -> None:
        """on_free is called with each that nobody looks at any more."""
        self._on_free = on_free
        self._begins: list[int] = []
        self._allocations: dict[int, Allocation] = {}
        self.num_bytes = 0

    def adopt(self, host: Tensor, home: Any, *, of_graph: bool) -> Tensor:
        """A device tensor over the memory of `host`, which becomes an allocation if it is none yet."""
        if host.numel():
            allocation = self.find(host.data_ptr())
            if allocation is None:
                allocation = Allocation(host, home)
                allocation.of_graph = of_graph
                insort(self._begins, allocation.begin)
                self._allocations[allocation.begin] = allocation
                self.num_bytes += allocation.num_bytes
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
        if allocation.is_freed and self._allocations.get(allocation.begin) is allocation:
            del self._allocations[allocation.begin]
            self._begins.remove(allocation.begin)
            self.num_bytes -= allocation.num_bytes
            self._on_free(allocation)


def poison(host: Tensor) -> None:
    """Fill memory that nobody has written."""
    if host.numel():
        torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage()).fill_(POISON)


# By address: what a device tensor needs as long as it lives.
_alive: dict[int, tuple[Any, ...]] = {}


def _device_tensor(host: Tensor, allocation: Allocation, let_go: Callable[[Allocation], None]) -> Tensor:
    code, bits = DL_TYPES[host.dtype]
    dimensions = ctypes.c_int64 * max(1, host.dim())
    shape, strides = dimensions(*host.shape), dimensions(*host.stride())
    managed = _DLManagedTensor(
        _DLTensor(
            host.data_ptr(), DL_CUDA, allocation.home.device, host.dim(), code, bits, 1, shape, strides, 0
        ),
        None,
        _deleter,
    )
    allocation.num_tensors += 1
    address = ctypes.addressof(managed)
    _alive[address] = (managed, host, shape, strides, allocation, let_go)
    return from_dlpack(_new_capsule(address, b"dltensor", None))


def _delete(managed: Any) -> None:
    """NOTE: an exception that is on its way when this runs is lost; what a name holds is let go later."""
    *_, allocation, let_go = _alive.pop(ctypes.addressof(managed.contents))
    allocation.num_tensors -= 1
    let_go(allocation)


_deleter = _Deleter(_delete)


@atexit.register
def _forget_deleters() -> None:
    """What is still there outlives Python, which must not be called then."""
    for managed, *_ in _alive.values():
        managed.deleter = _Deleter()


def let_torch_guard_cuda() -> None:
    """Torch without CUDA refuses to index a CUDA tensor, because nobody can switch to its device. The CPU's
    guard, which switches nothing, will do.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if guards[1] is None:
        guards[1] = guards[0]
