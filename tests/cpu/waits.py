"""CountWaits: sees operations for whose result the host would have to wait, were the tensors on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# The shape of their result depends on values on the device.
WAITING = {
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
}
BY_MASK = {"index", "index_put", "index_put_"}
# Of these no operation is seen: on a CPU they read the memory.
READING = {"item", "tolist", "__bool__", "__float__", "__index__", "__int__"}


class CountWaits:
    """A context. seen: the names of such operations, in order; Triton's launches are not among them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Operations(self.seen))
        self._modes.enter_context(_Reads(self.seen))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _Reads(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in READING:
            self._seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING or (name in BY_MASK and _has_mask(args[1])):
            self._seen.append(name)
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
