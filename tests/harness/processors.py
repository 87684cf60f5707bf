"""Logits processors like those of users, for launches of tests."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from torch import Tensor


def ban(logits: Tensor, token_ids: list[list[int]]) -> None:
    """Forbid each beam its own tokens."""
    assert logits.shape[:2] == (1, len(token_ids))
    for beam, ids in enumerate(token_ids):
        logits[0, beam, ids] = float("-inf")


class BanRepeats:
    """No token comes twice, and none of the prompt."""

    def __call__(
        self, request_id: int, logits: Tensor, token_ids: list[list[int]], stream: Any, client_id: Any
    ) -> None:
        ban(logits, token_ids)


class Force:
    """Returns new logits, in which one id is all there is."""

    def __call__(self, request_id: int, logits: Tensor, *rest: Any, token: int) -> Tensor:
        forced = logits.clone().fill_(float("-inf"))
        forced[..., token] = 0.0
        return forced


class FailAt:
    """Raises when the sequence has so many tokens."""

    def __call__(
        self,
        request_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream: Any,
        client_id: Any,
        length: int = 0,
    ) -> None:
        if len(token_ids[0]) >= length:
            logits.fill_(float("nan"))
            raise ValueError(f"too long: {len(token_ids[0])}")


class Record:
    """Writes down each call, by process."""

    def __call__(
        self,
        request_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream: Any,
        client_id: Any,
        folder: str,
    ) -> None:
        tokens = token_ids[0] if len(token_ids) == 1 else token_ids
        call = [request_id, list(logits.shape), tokens, stream, client_id, float(logits.sum())]
        with (Path(folder) / f"{os.getpid()}").open("a") as file:
            file.write(json.dumps(call) + "\n")


class AtRandom:
    """Draws one of a few ids, as no other rank does."""

    def __init__(self) -> None:
        self._random = random.Random()

    def __call__(self, request_id: int, logits: Tensor, *rest: Any) -> None:
        chosen = self._random.randrange(40, 90)
        kept = logits[..., chosen].clone()
        logits.fill_(float("-inf"))
        logits[..., chosen] = kept


class Bend:
    """Multiplies what it gets, and takes something off ids that stand among the newest ones of a beam."""

    def __call__(
        self,
        request_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream: Any,
        client_id: Any,
        factor: float = 1.0,
        newest: int = 3,
        less: float = 0.5,
    ) -> None:
        logits *= factor
        for beam, ids in enumerate(token_ids):
            logits[0, beam, sorted(set(ids[-newest:]))] -= less


class BanRepeatsTogether:
    """BanRepeats for all rows of a step; fails where a client is called `bad`."""

    def __call__(
        self,
        request_ids: list[int],
        logits: list[Tensor],
        token_ids: list[list[list[int]]],
        stream: Any,
        client_ids: list[Any],
    ) -> None:
        assert len(request_ids) == len(logits) == len(token_ids) == len(client_ids)
        for each, ids in zip(logits, token_ids, strict=True):
            ban(each, ids)
        if "bad" in client_ids:
            raise ValueError("a bad client")


class NotMade:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class NotCallable:
    pass
