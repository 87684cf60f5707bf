"""Torch's operations and Triton's launches on device tensors: computed on the host, noted on the timeline.

What a GPU would refuse is refused: operands on different devices, pageable memory where the host must not wait,
results whose shape the host would have to wait for. A recording keeps launches, not functions: what a replay does
not find in memory it has from the recording, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended_gpu.memory import POISON, Allocation, Memory
from tests.pretended_gpu.timeline import PretendedGpuError, Stream, Timeline, allocations

HOST = torch.device("cpu")

# The host waits for their result: a value, or a shape that depends on values.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(slots=True)
class Launch:
    """One of a recording."""

    name: str
    run: Callable[[], None]
    read: list[Allocation]
    written: list[Allocation]


@dataclass(slots=True)
class Recording:
    launches: list[Launch] = field(default_factory=list)


class Operations(TorchDispatchMode):
    """Active while the GPU is there, on the thread that uses it."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = timeline
        self.memory = Memory(timeline.free)
        self.recording: Recording | None = None
        self.names: list[str] = []
        """Of all launches, in order."""
        self._pinned: dict[int, Allocation] = {}

    # Host memory

    def pin(self, host: Tensor) -> Tensor:
        """The same memory, pinned from now on."""
        storage = host.untyped_storage()
        # Kept, so that no other tensor gets its address.
        self._pinned[storage.data_ptr()] = Allocation(host, self.timeline.current)
        return host

    def pinned(self, host: Tensor) -> Allocation | None:
        return self._pinned.get(host.untyped_storage().data_ptr())

    # Launches

    def launch(
        self, name: str, run: Callable[[], None], read: list[Allocation], written: list[Allocation]
    ) -> None:
        if self.recording is not None:
            self.recording.launches.append(Launch(name, run, read, written))
        else:
            self.timeline.launch(name, read, written)
            self.names.append(name)
        run()

    def replay(self, recording: Recording) -> None:
        for each in recording.launches:
            for allocation in (*each.read, *each.written):
                if allocation.is_freed and not allocation.of_graph:
                    self.timeline.problem(f"a graph's {each.name} uses memory that is free again")
            self.timeline.launch(each.name, each.read, each.written)
            self.names.append(each.name)
            each.run()

    def launch_triton(self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., None]) -> None:
        """A kernel with these arguments; run(args, kwargs) interprets it on host tensors."""
        name = kernel.__name__
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        for each in tensors:
            if not each.is_cuda:
                self.timeline.problem(f"the kernel {name} was given a tensor of the host")
        host_args = [self._host(each) for each in args]
        host_kwargs = {key: self._host(value) for key, value in kwargs.items()}
        touched = allocations(self.memory.of(each) for each in tensors)
        # Which of them it writes is not known.
        self.launch(name, lambda: _unobserved(run, host_args, host_kwargs), touched, touched)

    def _adopt(self, host: Tensor) -> Tensor:
        return self.memory.adopt(host, self.timeline.current, of_graph=self.recording is not None)

    def _host(self, value: Any) -> Any:
        return self.memory.host_of(value) if isinstance(value, Tensor) and value.is_cuda else value

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        wanted = kwargs.get("device")
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        on_device = [each for each in tensors if each.is_cuda]
        if name in ("_to_copy", "copy_"):
            if on_device or to_device:
                return self._copy(func, name, args, kwargs)
        if not on_device and not to_device:
            pins = kwargs.pop("pin_memory", False)
            result = func(*args, **kwargs)
            return self.pin(result) if pins else result
        with self:  # what it is made of
            made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        self._check_operands(name, tensors, args)
        if name in WAITING or (name in BY_INDEX and _has_mask(args[1])):
            self.timeline.wait_for(self.timeline.current.clock, name)
        if "device" in kwargs:
            kwargs["device"] = HOST
        kwargs.pop("pin_memory", None)
        return self._compute(func, name, args, kwargs, on_device)

    def _check_operands(self, name: str, tensors: Sequence[Tensor], args: Sequence[Any]) -> None:
        for each in tensors:
            if not each.is_cuda and (each.dim() or name in BY_INDEX):
                self.timeline.problem(f"{name} of tensors on the device and of a {tuple(each.shape)} on the host")

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, on_device: Sequence[Tensor]) -> Any:
        memory = self.memory
        given = {id(each): memory.host_of(each) for each in on_device}
        back = {id(host): each for each in on_device if (host := given[id(each)]) is not None}

        def host(value: Any) -> Any:
            return given.get(id(value), value) if isinstance(value, Tensor) else value

        host_args, host_kwargs = tree_map(host, args), tree_map(host, kwargs)
        result = _run(func, name, host_args, host_kwargs)
        if not any(isinstance(each, Tensor) for each in tree_leaves(result)):
            return result
        read = allocations(memory.of(each) for each in on_device)
        changed = [host(args[i]) for i in _written_arguments(func) if i < len(args)]
        changed += [host(kwargs[key]) for key in ("out",) if isinstance(kwargs.get(key), Tensor)]
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        fresh = [each for each in outputs if id(each) not in back and memory.find(each.data_ptr()) is None]
        if name in UNINITIALISED:
            for each in fresh:
                _poison(each)

        def adopted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return back[id(value)] if id(value) in back else self._adopt(value)

        made = tree_map(adopted, result)
        if name in UNINITIALISED or (not fresh and not changed):
            return made  # nothing is launched: memory, or another look at it
        written = allocations(memory.find(each.data_ptr()) for each in (*fresh, *changed) if each.numel())

        def again() -> None:
            redone = _run(func, name, host_args, host_kwargs)
            for old, new in zip(outputs, [each for each in tree_leaves(redone) if isinstance(each, Tensor)], strict=True):
                if new is not old and new.data_ptr() != old.data_ptr():
                    old.copy_(new)

        self._note(name, again, read, written)
        return made

    def _note(self, name: str, again: Callable[[], None], read: list[Allocation], written: list[Allocation]) -> None:
        """A launch whose work is done already."""
        if self.recording is not None:
            self.recording.launches.append(Launch(name, lambda: _unobserved(again), read, written))
        else:
            self.timeline.launch(name, read, written)
            self.names.append(name)

    def _copy(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Within the device, to it or from it."""
        if name == "copy_":
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, target = args[0], None
            waits = not kwargs.get("non_blocking", False)
        to_cuda = target.is_cuda if target is not None else (
            torch.device(kwargs["device"]).type == "cuda" if kwargs.get("device") is not None else source.is_cuda
        )
        if target is None:
            dtype = kwargs.get("dtype") or source.dtype
            host_target = torch.empty_like(self._host(source), dtype=dtype)
            _poison(host_target)
            target = self._adopt(host_target) if to_cuda else host_target
            if not to_cuda and kwargs.get("pin_memory"):
                self.pin(target)
        if source.is_cuda != target.is_cuda:
            on_host = source if target.is_cuda else target
            is_scalar = target.is_cuda and not source.dim()
            if self.pinned(on_host) is None and not is_scalar and on_host.numel():
                way = "to" if target.is_cuda else "from"
                if not waits:
                    self.timeline.problem(f"a copy {way} the device that waits for nothing is of pageable memory")
                waits = True
            if waits and on_host.numel():
                self.timeline.wait_for(self.timeline.current.clock, f"a copy of {tuple(on_host.shape)} that waits")
        into, of = self._host(target), self._host(source)
        read, written = self._accessed(source), self._accessed(target)
        self.launch("copy", lambda: _unobserved(into.copy_, of), read, written)
        if not target.is_cuda and waits:
            self.timeline.wait_for(self.timeline.current.clock, "a copy that waits")
        return target

    def _accessed(self, tensor: Tensor) -> list[Allocation]:
        return allocations([self.memory.of(tensor) if tensor.is_cuda else self.pinned(tensor)])


def _written_arguments(func: Any) -> list[int]:
    return [
        i
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _run(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "_scaled_mm":
        return _scaled_mm(*args, **kwargs)
    return func(*args, **kwargs)


def _scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, scale_result: Any = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """With a scale for each row and column, as cuBLAS takes it."""
    (m, k), n = a.shape, b.shape[1]
    assert a.stride(1) == 1, "the first factor is row-major"
    assert b.stride(0) == 1, "the second factor is column-major"
    assert k % 16 == 0, "rows of 16 bytes"
    assert n % 16 == 0, "rows of 16 bytes"
    assert scale_a.shape == (m, 1), "a scale for each row"
    assert scale_b.shape == (1, n), "a scale for each column"
    assert scale_a.is_contiguous(), "contiguous scales"
    assert scale_b.is_contiguous() or scale_b.stride(1) == 1, "contiguous scales"
    assert scale_a.dtype == scale_b.dtype == torch.float32, "float32 scales"
    assert out_dtype is torch.bfloat16, "bfloat16 is what scales of rows have"
    assert bias is None, "no bias"
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _poison(host: Tensor) -> None:
    if host.numel():
        flat = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
        flat.fill_(POISON)


def _unobserved(run: Callable[..., Any], *args: Any) -> None:
    """Work on host tensors, which no mode is to see."""
    with torch.utils._python_dispatch._disable_current_modes():
        run(*args)


@contextmanager
def on_stream(timeline: Timeline, stream: Stream) -> Iterator[None]:
    before, timeline.current = timeline.current, stream
    try:
        yield
    finally:
        timeline.current = before


__all__ = ["Operations", "PretendedGpuError", "Recording", "on_stream"]
