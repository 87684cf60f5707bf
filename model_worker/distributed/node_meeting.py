"""NodeMeeting: lets ranks on several machines find each other, and makes their groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from model_worker.distributed.group import GroupError
from model_worker.distributed.torch_group import TorchGroup, gloo_group


class NodeMeeting:
    def __init__(
        self,
        meet: Callable[[timedelta], Store],
        is_here: Callable[[int], bool],
        *,
        address: str,
        join_timeout_s: float,
    ) -> None:
        """Connect to the store of the ranks that were started together. is_here: returns True if a rank is on
        this machine. address: where gloo listens. Raises GroupError.
        """
        self.is_here = is_here
        self._address = address
        self._timeout_s = join_timeout_s
        self._timeout = timedelta(seconds=join_timeout_s)
        self._store = self._try(lambda: meet(self._timeout))

    def group(self, name: str, rank: int, size: int, device: torch.device) -> TorchGroup:
        """Join a group. rank: among the ranks that use the same name. Raises GroupError."""
        return TorchGroup(
            lambda timeout: self._room(name),
            rank,
            size,
            device,
            join_timeout_s=self._timeout_s,
            address=self._address,
        )

    def link(self, number: int, rank: int) -> Any:
        """Join the gloo group of the two ends of a link. rank: 0 or 1. Raises GroupError."""
        return self._try(
            lambda: gloo_group(self._room(f"link{number}"), rank, 2, self._address, self._timeout)
        )

    def _room(self, name: str) -> Store:
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def _try(self, join: Callable[[], Any]) -> Any:
        try:
            return join()
        except RuntimeError as error:  # the only exception that torch raises here
            raise GroupError(f"ranks on other machines do not come: {error}") from error
