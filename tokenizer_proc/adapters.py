"""AdapterTable: which adapter a request means, and which version of its files there is now."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import msgspec

from runtime.base.errors import Forbidden, InvalidRequest
from runtime.checkpoint.adapters.lora_config import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from runtime.ring.adapters_file import AdaptersFile
from runtime.ring.tenants import OWNER
from runtime.wire.plan import NO_LORA, AdapterRef

PARAM = "lora_request"
MAX_KNOWN = 4096
"""Directories whose version is remembered."""


class AdapterTable:
    """`listed`: adapters that are served by name; None: no adapters are served."""

    def __init__(self, listed: AdaptersFile | None = None, max_rank: int = 0) -> None:
        self._listed = listed
        self._max_rank = max_rank
        self._versions: OrderedDict[str, tuple[object, str]] = OrderedDict()

    def resolved(self, asked: AdapterRef | None, tenant: str) -> AdapterRef | None:
        """Return the adapter with its path and version. Raises InvalidRequest when there is none that can be
        served, and Forbidden for a path of a tenant's.
        """
        if asked is None:
            return None
        if self._listed is None:
            raise InvalidRequest(NO_LORA, param=PARAM, code="lora_not_enabled")
        if not asked.path:
            known = self._listed.read().get(asked.name)
            if known is None:
                raise InvalidRequest(
                    f"lora_request: there is no adapter {asked.name!r:.100}",
                    param=PARAM,
                    code="unknown_adapter",
                )
            asked = AdapterRef(asked.name, known.id, "", known.path, known.pinned)
        elif tenant != OWNER:
            raise Forbidden("lora_request: this key may name adapters of the launch, and no paths")
        else:
            asked = msgspec.structs.replace(asked, pinned=False)
        return msgspec.structs.replace(asked, version=self._version(asked.path))

    def _version(self, path: str) -> str:
        """Return the version of the files as they are now; they are read when they have changed."""
        stamp = _stamp(path)
        known = self._versions.get(path)
        if known is None or known[0] != stamp:
            try:
                known = stamp, read_adapter(Path(path), self._max_rank).version
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param=PARAM, code=error.code) from None
            self._versions[path] = known
            if len(self._versions) > MAX_KNOWN:
                self._versions.popitem(last=False)
        return known[1]


def _stamp(path: str) -> object:
    """Return size and time of the files; None where one is missing, which is read, and refused, each time."""
    try:
        both = [os.stat(os.path.join(path, name)) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError):
        return None
    return tuple((each.st_size, each.st_mtime_ns, each.st_ino) for each in both)
