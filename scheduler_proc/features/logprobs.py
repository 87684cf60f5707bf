"""LogprobsFeature: sends the logprobs of a sequence's tokens to its client, as many as it asked for."""

from __future__ import annotations

from collections.abc import Callable

from runtime.wire.messages import TokenLogprobs
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.base import RequestFeature


class LogprobsFeature(RequestFeature):
    """Reports logprobs. It must be the last feature of its request, because it reports the ids that count."""

    def __init__(self, handle: bytes, num_top: int, emit: Callable[[TokenLogprobs], None]) -> None:
        self._handle = handle
        self._num_top = num_top
        self._emit = emit

    def accept(self, sampled: Sampled) -> list[int]:
        got, n, k = sampled.logprobs, len(sampled.ids), self._num_top
        assert got is not None, "the row was planned without logprobs"
        self._emit(
            TokenLogprobs(
                self._handle,
                got.chosen[:n].tobytes(),
                got.top_ids[:n, :k].tobytes(),
                got.top[:n, :k].tobytes(),
            )
        )
        return sampled.ids


def attach_logprobs(emit: Callable[[TokenLogprobs], None]) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives LogprobsFeature to each request that asked."""

    def attach(req: Request) -> RequestFeature | None:
        num_logprobs = req.sampling.logprobs
        if num_logprobs is None or req.group is not None:  # a search reports its own at the end
            return None
        return LogprobsFeature(req.handle, num_logprobs, emit)

    return attach
