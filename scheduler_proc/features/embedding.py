"""EmbeddingFeature: returns the vector of a prompt instead of output. Its request ends with its prompt,
without an output token.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.checkpoint.pooling import PoolingKind
from runtime.wire.messages import TensorEntry
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.base import EmitTensor, RequestFeature

FLOAT_BYTES = 4


class EmbeddingFeature(RequestFeature):
    def __init__(self, req: Request, pooling: PoolingKind, emit: EmitTensor) -> None:
        self._handle = req.handle
        self._emit = emit
        if pooling == "mean":  # every position counts, so none can come from the cache
            req.wanted_from = 0

    def accept(self, sampled: Sampled) -> list[int]:
        vector = sampled.vector
        assert vector is not None, "the worker was not loaded to embed"
        size = memoryview(vector).nbytes // FLOAT_BYTES
        self._emit(TensorEntry(self._handle, "embedding", "float32", (1, size), 0), vector)
        return []


def attach_embedding(pooling: PoolingKind, emit: EmitTensor) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives an EmbeddingFeature to every request of an embedding server."""

    def attach(req: Request) -> RequestFeature | None:
        return EmbeddingFeature(req, pooling, emit)

    return attach
