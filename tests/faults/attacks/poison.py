"""An attention backend that ends its process at a certain token, as a fault in a kernel would."""

from __future__ import annotations

import ctypes

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.torch_native import TorchNativeAttention

POISON_ID = 1234


class PoisonedAttention(TorchNativeAttention):
    def prepare(self, batch: ForwardBatch) -> None:
        if bool((batch.input_ids == POISON_ID).any()):
            ctypes.string_at(0)
        super().prepare(batch)
