"""Torch's operations and Triton's launches on device tensors: computed on the host, recorded on the timeline.

Operations that a GPU would refuse are refused: operands on different devices, pageable memory where the host
must not wait, results whose shape the host would have to wait for. A recording keeps launches, not functions:
data that a replay does not find in memory comes from the recording, as on a GPU. Neither kernels nor
collectives are computed in a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.harness.pretended_gpu.cuda_only import CUDA_ONLY
from tests.harness.pretended_gpu.memory import Allocation, Memory, Pool, poison
from tests.harness.pretended_gpu.timeline import Timeline

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
COPIES = {"_to_copy", "copy_"}
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(slots=True)
class Launch:
    name: str
    run: Callable[[], object]
    read: list[Allocation]
    written: list[Allocation]


@dataclass(slots=True)
class Recording:
    pool: Pool = field(default_factory=Pool)
    launches: list[Launch] = field(default_factory=list)


class Operations(TorchDispatchMode):
    """Active while the GPU is there, on the thread that uses it."""

    def __init__(self, timeline: Timeline, num_bytes: int) -> None:
        """num_bytes: what allocations may take together."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = timeline
        self.memory = Memory(num_bytes, timeline.free)
        self.recording: Recording | None = None
        self.names: list[str] = []
        """Names of all launches, in order."""
        self._pinned: dict[int, Allocation] = {}

    def pin(self, host: Tensor) -> Tensor:
        """The same memory, pinned from now on. It is kept, so that no other tensor gets its address."""
        if host.numel():  # all others have the same address
            allocation = Allocation(host, self.timeline.current)
            allocation.num_tensors = 1  # a recording may read it
            self._pinned[allocation.begin] = allocation
        return host

    def pinned(self, host: Tensor) -> Allocation | None:
        """None: pageable, or without elements."""
        return self._pinned.get(host.untyped_storage().data_ptr())

    # Launches

    def replay(self, recording: Recording) -> None:
        for each in recording.launches:
            for allocation in (*each.read, *each.written):
                if allocation.is_freed and not allocation.of_graph:
                    self.timeline.problem(f"a graph's {each.name} uses memory that is free again")
            self._note(each)
            with _disable_current_modes():
                each.run()

    def launch(self, launch: Launch) -> None:
        """Work that is recorded or done: on a GPU a recording computes nothing."""
        self._enqueue(launch)
        if self.recording is None:
            with _disable_current_modes():
                launch.run()

    def launch_triton(
        self, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], interpret: Callable[..., object]
    ) -> None:
        """A kernel with these arguments; interpret(*args, **kwargs) runs it on tensors of the host."""
        name = kernel.__name__
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if not all(each.is_cuda for each in tensors):
            self.timeline.problem(f"the kernel {name} was given a tensor of the host")
        self.check_devices(name, tensors)
        host_args = [self.host(each) for each in args]
        host_kwargs = {key: self.host(value) for key, value in kwargs.items()}
        touched = [each for tensor in tensors for each in self.memory_of(tensor)]
        # Which of them it writes is not known.
        self.launch(Launch(name, lambda: interpret(*host_args, **host_kwargs), touched, touched))

    def _enqueue(self, launch: Launch) -> None:
        if self.recording is not None:
            # The order of streams in a recording is what a replay will have.
            self.timeline.launch(launch.name, launch.read, launch.written)
            self.recording.launches.append(launch)
        else:
            self._note(launch)

    def _note(self, launch: Launch) -> None:
        self.timeline.launch(launch.name, launch.read, launch.written)
        self.names.append(launch.name)

    def check_devices(self, name: str, tensors: Sequence[Tensor], device: Any = None) -> None:
        """Torch would take the tensors' device for the current one; nothing here means it to."""
        indices = {each.get_device() for each in tensors if each.is_cuda}
        if device is not None:
            indices.add(self.timeline.index_of(device))
        for index in indices - {self.timeline.device}:
            self.timeline.problem(f"{name} on device {index}, but {self.timeline.device} is the current one")

    def memory_of(self, tensor: Tensor) -> list[Allocation]:
        allocation = self.memory.of(tensor) if tensor.is_cuda else self.pinned(tensor)
        return [] if allocation is None else [allocation]

    def host(self, value: Any) -> Any:
        return self.memory.host_of(value) if isinstance(value, Tensor) and value.is_cuda else value

    def _adopt(self, host: Tensor) -> Tensor:
        pool = self.memory.pool if self.recording is None else self.recording.pool
        return self.memory.adopt(host, self.timeline.current, pool)

    # Operations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if each.is_cuda]
        if not on_device and not _is_cuda(kwargs.get("device")):
            pins = kwargs.pop("pin_memory", False)
            result = func(*args, **kwargs)
            return self.pin(result) if pins else result
        device = kwargs.get("device")
        self.check_devices(name, on_device, device if _is_cuda(device) else None)
        if name in COPIES:
            return self._copy(name, args, kwargs)
        with self:  # the operations that it is made of
            made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        # A scalar of the host is an argument of the kernel; an index of the host is copied, which waits.
        foreign = [each for each in tensors if not each.is_cuda and each.dim() and on_device]
        if foreign and name not in BY_INDEX:
            self.timeline.problem(f"{name} on the device of a {tuple(foreign[0].shape)} on the host")
        if name in WAITING or (name in BY_INDEX and (foreign or _has_mask(args[1]))):
            self.timeline.wait_for(self.timeline.current.clock, name)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return self._compute(func, name, args, kwargs, on_device)

    def _compute(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], on_device: list[Tensor]
    ) -> Any:
        """Return what func returns, on the device: memory of its own or another look at its operands'."""
        memory = self.memory
        on_host = {id(each): memory.host_of(each) for each in on_device}
        operand_of = {id(on_host[id(each)]): each for each in on_device}

        def to_host(value: Any) -> Any:
            return on_host.get(id(value), value)

        host_args, host_kwargs = tree_map(to_host, args), tree_map(to_host, kwargs)
        compute = CUDA_ONLY.get(func, func)
        result = compute(*host_args, **host_kwargs)
        outputs = _tensors(result)
        if not outputs:
            return result
        fresh = [each for each in outputs if id(each) not in operand_of and not memory.find(each.data_ptr())]
        if name in UNINITIALISED:
            for each in fresh:
                poison(each)
        # A look at a tensor from outside of inference mode is such a tensor itself, as torch has it.
        has_outside = not all(each.is_inference() for each in on_device)

        def to_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in operand_of:
                return operand_of[id(value)]
            outside = has_outside and all(value is not each for each in fresh)
            with torch.inference_mode(torch.is_inference_mode_enabled() and not outside):
                return self._adopt(value)

        made = tree_map(to_device, result)
        changed = [each for each in (*fresh, *_changed(func, host_args, host_kwargs)) if each.numel()]
        if name in UNINITIALISED or not changed:
            return made  # nothing is launched: memory, or another look at it

        def again() -> None:
            redone = _tensors(compute(*host_args, **host_kwargs))
            for old, new in zip(outputs, redone, strict=True):
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)

        written = [found for each in changed if (found := memory.find(each.data_ptr())) is not None]
        read = [found for each in on_device for found in self.memory_of(each)]
        self._enqueue(Launch(name, again, read, written))
        return made

    def _copy(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Within the device, to it or from it."""
        target: Tensor
        if name == "copy_":
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source = args[0]
            waits = not kwargs.get("non_blocking", False)
            target = torch.empty_like(self.host(source), dtype=kwargs.get("dtype"))
            poison(target)
            device = kwargs.get("device")
            if source.is_cuda if device is None else _is_cuda(device):
                target = self._adopt(target)
            elif kwargs.get("pin_memory"):
                self.pin(target)
        crosses = source.is_cuda != target.is_cuda and source.numel() > 0
        if crosses:
            on_host = source if target.is_cuda else target
            if self.pinned(on_host) is None and not (target.is_cuda and not source.dim()):
                if not waits:
                    self.timeline.problem("a copy for which the host does not wait is of pageable memory")
                waits = True
        into, of = self.host(target), self.host(source)
        read, written = self.memory_of(source), self.memory_of(target)
        # Done in a recording, too: operations of torch that come after it look at what they are given.
        self._enqueue(Launch("copy", lambda: into.copy_(of), read, written))
        with _disable_current_modes():
            into.copy_(of)
        if crosses and waits:
            self.timeline.wait_for(self.timeline.current.clock, f"a copy of {tuple(source.shape)}")
        return target


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands that func writes to."""
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False), **kwargs)
    return _tensors(
        [
            named.get(each.name)
            for each in func._schema.arguments
            if each.alias_info is not None and each.alias_info.is_write
        ]
    )


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
