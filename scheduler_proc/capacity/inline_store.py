"""InlineStore: keeps adapters that came with requests, up to a limit, and chooses which to remove. It removes
the least recently used adapter that no live request uses, of the tenant that has the most, the new one
included. If that would not be enough, it removes none and refuses the new one.
Files are handled by KeptFiles only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from runtime.base.errors import AdapterNotResident, InvalidRequest
from runtime.ring.adapters_file import KeptAdapter
from runtime.wire.plan import AdapterRef

PARAM = "lora_config"
MAX_KEPT = 4096
"""Maximum number of adapters and prompt tables that are kept, whatever their size."""


class KeptFiles(Protocol):
    """The run directory's folders of adapters that came with requests."""

    def kept_adapters(self) -> list[tuple[str, KeptAdapter]]:
        """Return the kept adapters with their paths."""

    def kept_adapter(self, path: str) -> KeptAdapter | None:
        """Return the kept adapter at a path, or None."""

    def is_inline(self, path: str) -> bool:
        """Return True if a path is where an adapter that came with a request is kept, or was."""

    def remove_adapter(self, path: str) -> None:
        """Remove the directory of an adapter."""


def _holder(path: str) -> str:
    """Return the part of a path that stands for a tenant."""
    return path.rpartition("/")[2].partition("-")[0]


class InlineStore:
    """Store of adapters that came with requests. It is limited in rank rows if max_rows is given, and
    otherwise in bytes.
    """

    def __init__(
        self,
        files: KeptFiles,
        in_use: Callable[[], Iterable[str]],
        *,
        max_bytes: int,
        max_rows: int = 0,
        page_rows: int = 1,
    ) -> None:
        """in_use: returns the paths of adapters of live requests. max_rows: limit, counted in whole pages of
        `page_rows`; 0: max_bytes is the limit.
        """
        self._files = files
        self._in_use = in_use
        self._page_rows = page_rows
        self._is_by_pages = max_rows > 0
        self._room = max_rows // page_rows if max_rows else max_bytes
        self._kept: OrderedDict[str, KeptAdapter] = OrderedDict()
        self._num_used = 0
        self.num_evicted = 0
        for path, kept in files.kept_adapters():
            self._add(path, kept)

    def put(self, path: str) -> None:
        """Keep a complete directory. Raises InvalidRequest, and removes the directory, if there is no room
        for it.
        """
        if path in self._kept:
            self._kept.move_to_end(path)
            return
        kept = self._files.kept_adapter(path)
        if kept is None:
            raise AdapterNotResident("lora_config: the weights are not kept any more", param=PARAM)
        needed = self._size(kept)
        if not self._has_room(needed):
            in_use = frozenset(self._in_use())
            sizes = [self._size(each) for other, each in self._kept.items() if other in in_use]
            free = self._room - sum(sizes)
            if needed > free or len(sizes) >= MAX_KEPT:
                self._files.remove_adapter(path)
                unit = "pages" if self._is_by_pages else "bytes"
                raise InvalidRequest(
                    f"lora_config: the weights take {needed} {unit}; {free} of {self._room} are not in use "
                    "(--lora-host-cache-size, --lora-host-rows)",
                    param=PARAM,
                    code="no_room_for_adapter",
                )
            self._make_room(needed, _holder(path), in_use)
        self._add(path, kept)

    def _make_room(self, needed: int, holder: str, in_use: Collection[str]) -> None:
        """Remove adapters until there is room for a new one of this holder."""
        amounts, idle = Counter({holder: needed}), dict[str, deque[str]]()
        for path, kept in self._kept.items():
            amounts[_holder(path)] += self._size(kept)
            if path not in in_use:
                idle.setdefault(_holder(path), deque()).append(path)
        while not self._has_room(needed):
            most = max(idle, key=lambda each: amounts[each])
            path = idle[most].popleft()
            if not idle[most]:
                del idle[most]
            amounts[most] -= self._size(self._kept[path])
            self._remove(path)
            self.num_evicted += 1

    def has(self, path: str) -> bool:
        """Return True if a path is the directory of an adapter that came with a request, kept or not."""
        return self._files.is_inline(path)

    def use(self, adapter: AdapterRef) -> None:
        """Record that a request uses an adapter which it names by its task id. Raises AdapterNotResident if
        it is not kept.
        """
        if adapter.path in self._kept:
            self._kept.move_to_end(adapter.path)
            return
        self.put(adapter.path)  # a tokenizer ended before it could report this

    def note_failure(self, adapter: AdapterRef, message: str) -> str:
        """Forget an adapter that the device cannot load. Returns the message with the run directory's paths
        removed.
        """
        if adapter.path not in self._kept:
            return message
        self._remove(adapter.path)
        return message.replace(f"the adapter in {adapter.path}", "lora_config")

    def _has_room(self, needed: int) -> bool:
        return self._num_used + needed <= self._room and len(self._kept) < MAX_KEPT

    def _add(self, path: str, kept: KeptAdapter) -> None:
        self._kept[path] = kept
        self._num_used += self._size(kept)

    def _size(self, kept: KeptAdapter) -> int:
        return -(-kept.num_rows // self._page_rows) if self._is_by_pages else kept.num_bytes

    def _remove(self, path: str) -> None:
        self._num_used -= self._size(self._kept.pop(path))
        self._files.remove_adapter(path)

    def figures(self) -> Mapping[str, int]:
        """Return the figures on adapters that came with requests, for /server_info."""
        pages = [-(-kept.num_rows // self._page_rows) for kept in self._kept.values()]
        return {
            "num_host_adapters": len(self._kept),
            "num_host_pages": sum(pages),
            "max_host_pages": self._room if self._is_by_pages else 0,
            "host_adapter_bytes": sum(kept.num_bytes for kept in self._kept.values()),
            "max_host_adapter_bytes": 0 if self._is_by_pages else self._room,
            "num_host_evictions": self.num_evicted,
        }
