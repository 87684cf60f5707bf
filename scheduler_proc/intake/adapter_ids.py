"""AdapterIds: which adapter each id stands for, so that no id comes to mean two of them."""

from __future__ import annotations

from collections import OrderedDict

from runtime.base.errors import InvalidRequest
from runtime.wire.plan import AdapterRef

MAX_IDS = 1 << 16
"""Most ids that are remembered; what was used least recently is forgotten first."""


class AdapterIds:
    """Names and paths that ids of adapters stand for, bounded in number."""

    def __init__(self, max_ids: int = MAX_IDS) -> None:
        self._max_ids = max_ids
        self._of: OrderedDict[tuple[bool, int], tuple[str, str]] = OrderedDict()
        """By whether it is a prompt table, and id."""

    def check(self, adapter: AdapterRef) -> None:
        """Check the id of an adapter. Raises InvalidRequest when it has been used with another name or
        path.
        """
        asked = adapter.name, adapter.path
        key = adapter.num_virtual > 0, adapter.id
        known = self._of.setdefault(key, asked)
        self._of.move_to_end(key)
        if len(self._of) > self._max_ids:
            self._of.popitem(last=False)
        if known != asked:
            what = "name" if known[0] != adapter.name else "path"
            param = "prompt_adapter_request" if key[0] else "lora_request"
            raise InvalidRequest(
                f"{param}: id {adapter.id} was used with another {what}; an id stands for one adapter",
                param=param,
            )
