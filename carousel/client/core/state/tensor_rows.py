"""TensorRows: rows of one tensor, as they arrive with a sequence's output."""

from __future__ import annotations

import math

import numpy as np

from carousel.client.core.mailbox import TensorPart
from runtime.base.errors import RequestError
from runtime.wire.format import FloatArray


class TensorRows:
    """Rows of one tensor. It keeps the frames as they arrived until the whole is asked for. A later attempt
    of the sequence repeats some rows, which are equal and are skipped.
    """

    __slots__ = ("_parts", "num_rows")

    def __init__(self) -> None:
        self._parts: list[FloatArray] = []
        self.num_rows = 0

    def add(self, part: TensorPart) -> None:
        num_known = self.num_rows - part.entry.start
        if num_known < 0:
            raise RequestError(
                f"{part.entry.name}: rows from {part.entry.start} on came where those from "
                f"{self.num_rows} on were expected"
            )
        if memoryview(part.data).nbytes != 4 * math.prod(part.entry.shape):
            raise RequestError(f"{part.entry.name}: a frame is not of the size that it was said to have")
        rows = np.frombuffer(part.data, np.float32).reshape(part.entry.shape)
        if num_known < len(rows):
            self._parts.append(rows[num_known:])
            self.num_rows += len(rows) - num_known

    def array(self) -> FloatArray:
        # Joined even if there is one part, so that the caller gets memory of its own and the received frame
        # is freed.
        if len(self._parts) > 1 or not self._parts[0].flags.owndata:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]
