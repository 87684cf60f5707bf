"""Recording: the kernel calls of a function of tensors, kept as one list that C++ runs by itself. Knows no
model.

    recorded once   the function runs on tensors of a few rows; kernels are noted instead of called
    run each step   the same calls with the step's own numbers of rows, in one call from Python

Only kernels can be noted. Any other operation that makes or changes a tensor ends the recording with
NotRecordable, so that a program never leaves out what the function did. Views are free.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_worker.kernels.native.library import Condition, NativeKernels
from model_worker.kernels.native.step_calls import ProgramCall, ProgramStep

ALIGNMENT = 64  # bytes
# Gap between buffers. Without it, rows of buffers for 2^n rows would compete for the same cache lines.
GAP = 17 * ALIGNMENT
ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


class NotRecordable(Exception):
    """The function does something that is not a kernel; the message names it."""


class _Tape(TorchDispatchMode):
    """Records kernel calls and their memory, and refuses all other operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[int, ctypes.Structure]] = []
        self.conditions: list[Condition | None] = []
        self.buffers: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because nothing is compiled here. The default would import torch._dynamo on the first
        call, which takes 0.9 s of each worker's start.
        """
        return False

    def note(self, function: int, call: ctypes.Structure, condition: Condition | None) -> None:
        self.calls.append((function, type(call).from_buffer_copy(call)))
        self.conditions.append(condition)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ALLOCATIONS:
            buffer = func(*args, **(kwargs or {}))
            self.buffers.append(buffer)
            return buffer
        result = func(*args, **(kwargs or {})) if func.is_view else None
        views = result if isinstance(result, tuple | list) else (result,)
        memory = args[0].untyped_storage().data_ptr()
        if any(view is None or view.untyped_storage().data_ptr() != memory for view in views):
            raise NotRecordable(str(func))
        return result


@dataclass(slots=True)
class _Buffer:
    """Allocation of the recording: its original address, the first and last call that need it, its size,
    and its place in the arena.
    """

    address: int
    recorded_size: int
    size: int
    first: int = -1
    last: int = -1
    offset: int = field(default=0)

    def overlaps(self, other: _Buffer) -> bool:
        """Return True if both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


class Arena:
    """Memory shared by programs that never run at the same time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return at least `size` bytes. Earlier, smaller results may be other memory."""
        if size > self._memory.nbytes:
            # Not zeroed, so memory for large batches is taken only when one comes.
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory


class Program:
    """A recorded function of a step's integers. Only one caller at a time may use it; the next run overwrites
    the result.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        function: Callable[[], Tensor | Sequence[Tensor]],
        inputs: object,
        *,
        num_tokens: int,
        num_outputs: int,
        num_seqs: int,
        max_tokens: int = 0,
        max_outputs: int = 0,
        arena: Arena | None = None,
    ) -> None:
        """Record `function`, which reads its inputs, int64 tensors of those numbers of tokens, outputs and
        sequences, through kernels alone; `inputs` is what keeps their memory, for they are read there in
        every run, as many as that has. num_outputs must differ from num_tokens, to tell which rows a kernel
        works on. A function may have several results; outputs that are memory of its inputs stay there.
        max_tokens, max_outputs: limits of a `run`; 0: as many as were recorded. arena: where it works; its
        own when not given.

        Raises: NotRecordable.
        """
        assert num_tokens != num_outputs
        self._run = kernels.run_program
        tape = _Tape()
        kernels.recording.tape = tape
        try:
            with tape:
                made = function()
        finally:
            kernels.recording.tape = None
        results = [made] if isinstance(made, Tensor) else made
        self._structs = [call for _, call in tape.calls]
        rows = {num_tokens: max_tokens or num_tokens, num_outputs: max_outputs or num_outputs}
        self._arena, self._made = _arrange(self._structs, tape.buffers, rows, results, arena or Arena())
        self.num_calls = len(tape.calls)
        self._calls = (ProgramCall * self.num_calls)()
        for entry, (address, call), condition in zip(self._calls, tape.calls, tape.conditions, strict=True):
            entry.run = address
            if condition is not None:
                entry.condition, entry.is_nonzero = condition
            entry.call = ctypes.addressof(call)
            row_field: str = call.row_field
            num_rows = getattr(call, row_field)
            if num_rows not in (num_tokens, num_outputs):
                raise NotRecordable(f"a kernel on {num_rows} rows, which are neither tokens nor outputs")
            kind = "tokens" if num_rows == num_tokens else "outputs"
            setattr(entry, kind, _address_of(call, row_field))
            if hasattr(call, "num_seqs"):
                assert call.num_seqs == num_seqs
                entry.seqs = _address_of(call, "num_seqs")
        self._inputs = inputs
        self._step = ProgramStep(
            calls=ctypes.addressof(self._calls),
            num_calls=self.num_calls,
        )
        self.step_at = ctypes.addressof(self._step)
        """Address of the ProgramStep, for code that runs the program as part of something else."""
        self._results: dict[int, Tensor] = {}  # by number of rows

    def run(self, *, num_tokens: int, num_outputs: int, num_seqs: int) -> Tensor:
        """Run the program on what its inputs contain now. Returns the result [num_outputs, ...], valid until
        the next run.
        """
        step = self._step
        step.tokens, step.outputs, step.seqs = num_tokens, num_outputs, num_seqs
        self._run(self.step_at)
        return self.result(num_outputs)

    def result(self, num_outputs: int) -> Tensor:
        """Return the result of the last run, which had num_outputs outputs."""
        if (result := self._results.get(num_outputs)) is None:
            self._results[num_outputs] = result = self._made[0][:num_outputs]
        return result

    def results(self, num_rows: int) -> list[Tensor]:
        """Return num_rows rows of each result of the last run that is not memory of its inputs."""
        return [made[:num_rows] for made in self._made]


def _arrange(
    calls: Sequence[ctypes.Structure],
    tensors: Sequence[Tensor],
    rows: dict[int, int],
    results: Sequence[Tensor],
    shared: Arena,
) -> tuple[Tensor, list[Tensor]]:
    """Give buffers that are never needed at the same time the same memory, and set the calls' pointers. rows:
    new number of rows, by the recorded number. Returns that memory and the results in it.
    """
    buffers = [
        _Buffer(tensor.data_ptr(), tensor.nbytes, tensor[:1].nbytes * rows.get(len(tensor), len(tensor)))
        for tensor in tensors
    ]
    for number, call in enumerate(calls):
        for _, buffer, _ in _uses(call, buffers):
            buffer.first = number if buffer.first < 0 else buffer.first
            buffer.last = number
    if not calls:
        raise NotRecordable("no kernel")
    by_address = {buffer.address: buffer for buffer in buffers}
    kept = [(by_address[each.data_ptr()], each) for each in results if each.data_ptr() in by_address]
    for buffer, _ in kept:
        buffer.last = len(calls)
    placed: list[_Buffer] = []
    for buffer in sorted((b for b in buffers if b.first >= 0), key=lambda b: b.first):
        for other in sorted((b for b in placed if b.overlaps(buffer)), key=lambda b: b.offset):
            if buffer.offset + buffer.size <= other.offset:
                break
            buffer.offset = max(buffer.offset, _aligned(other.offset + other.size + GAP))
        placed.append(buffer)
    arena = shared.take(max(b.offset + b.size for b in placed))
    for call in calls:
        for name, buffer, inside in list(_uses(call, buffers)):
            setattr(call, name, arena.data_ptr() + buffer.offset + inside)
    made = [
        arena[buffer.offset : buffer.offset + buffer.size].view(each.dtype).view(-1, *each.shape[1:])
        for buffer, each in kept
    ]
    return arena, made


def _uses(call: ctypes.Structure, buffers: Sequence[_Buffer]) -> Iterator[tuple[str, _Buffer, int]]:
    """Yield each pointer of a call that points into a buffer: its field, the buffer, and the byte offset
    there.
    """
    for name, kind in call._fields_:  # type: ignore[misc]
        if kind is not ctypes.c_void_p or (address := getattr(call, name)) is None:
            continue
        for buffer in buffers:
            if 0 <= address - buffer.address < buffer.recorded_size:
                yield name, buffer, address - buffer.address


def _address_of(call: ctypes.Structure, name: str) -> int:
    offset: int = getattr(type(call), name).offset
    return ctypes.addressof(call) + offset


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
