"""AdapterIds: remembers which adapter each id refers to, so that an id never comes to mean two adapters."""

from __future__ import annotations

from collections import OrderedDict

from runtime.base.errors import InvalidRequest
from runtime.wire.plan import AdapterRef

MAX_IDS = 1 << 16
"""Maximum number of ids that are remembered. The least recently used is forgotten first."""


class AdapterIds:
    """Name and path of each adapter id, bounded in number."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[bool, int], tuple[str, str]] = OrderedDict()
        """Pairs (name, path) by (True for a prompt table, id)."""

    def check(self, adapter: AdapterRef) -> None:
        """Check and remember the id of an adapter. Raises InvalidRequest if it was used with another name or
        path.
        """
        asked = adapter.name, adapter.path
        key = adapter.num_virtual > 0, adapter.id
        known = self._of.setdefault(key, asked)
        self._of.move_to_end(key)
        if len(self._of) > MAX_IDS:
            self._of.popitem(last=False)
        if known != asked:
            what = "name" if known[0] != adapter.name else "path"
            param = "prompt_adapter_request" if key[0] else "lora_request"
            raise InvalidRequest(
                f"{param}: id {adapter.id} was used with another {what}; an id stands for one adapter",
                param=param,
            )
