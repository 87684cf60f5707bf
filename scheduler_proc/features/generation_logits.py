"""GenerationLogits: sends the raw logits and additional outputs of a sequence's output tokens to its client,
without those of tokens that were cut off.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.wire.messages import TensorEntry
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.base import EmitTensor, RequestFeature


class GenerationLogits(RequestFeature):
    """Reports raw logits of the output. It must come after every feature that shortens the sampled ids,
    because it reports the ids that count.
    """

    def __init__(self, req: Request, emit: EmitTensor) -> None:
        self._req = req
        self._emit = emit

    def accept(self, sampled: Sampled) -> list[int]:
        req = self._req
        end = req.num_tokens + len(sampled.ids)
        for logits in sampled.logits:
            kept = logits.upto(end)
            if kept is not None:
                shape = (kept.num_positions, kept.vocab_size)
                start = kept.start - req.num_prompt
                self._emit(TensorEntry(req.handle, "generation_logits", "float32", shape, start), kept.frame)
        for name, rows in sampled.outputs:
            # A row of additional outputs belongs to the token before the one sampled from it.
            kept = rows.upto(end - 1)
            if kept is not None:
                shape = (kept.num_positions, kept.vocab_size)
                entry = TensorEntry(req.handle, name, "float32", shape, kept.start - req.num_prompt)
                self._emit(entry, kept.frame)
        return sampled.ids


def attach_generation_logits(emit: EmitTensor) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives GenerationLogits to each request that asked."""

    def attach(req: Request) -> RequestFeature | None:
        if req.group is not None:  # a beam search reads them itself
            return None
        sampling = req.sampling
        wants_rows = sampling.return_generation_logits or sampling.additional_outputs
        return GenerationLogits(req, emit) if wants_rows else None

    return attach
