"""GenerationOutput: the part of a GenerationResult's output that one sequence delivers at a time.

New tokens are available at once. The whole sequence is assembled only when it is asked for, so that each
output of a long sequence costs no more than one of a short sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol

from carousel.client.core.logprobs import PromptLogprobs, TokenLogprob
from carousel.client.core.result import CompletionOutput
from carousel.client.core.state.sequence_state import SequenceState
from runtime.wire.format import FloatArray


class Extent(NamedTuple):
    """Length of a sequence so far. Sequences only grow, so an extent identifies the state at one moment."""

    num_chars: int = 0
    num_tokens: int = 0
    num_logprobs: int = 0
    num_logits: int = 0
    num_output_rows: int = 0
    is_end: bool = False
    num_shown: int = 0
    """Number of times that a beam search's state was delivered."""

    @staticmethod
    def of(sequence: SequenceState) -> Extent:
        return Extent(
            sequence.num_chars,
            len(sequence.token_ids),
            len(sequence.logprobs),
            sequence.num_rows("generation_logits"),
            sequence.num_output_rows,
            sequence.finish_reason is not None,
            sequence.num_shown,
        )


class Owner(Protocol):
    """The GenerationResult that an output belongs to."""

    lock: Lock
    """Lock for reading and changing the sequences."""
    prefix: list[int]
    """Ids that are put in front of the generated ones."""

    @property
    def outputs(self) -> list[GenerationOutput]: ...
    @property
    def prompt_logprobs(self) -> PromptLogprobs: ...
    @property
    def context_logits(self) -> FloatArray | None: ...
    @property
    def additional_context_outputs(self) -> dict[str, FloatArray]: ...


class GenerationOutput(CompletionOutput):
    """A CompletionOutput that knows the request it belongs to."""

    __slots__ = ("_sequence", "extent", "logprobs_diff", "result")

    extent: Extent
    """Extent of the sequence when this output was made."""
    logprobs_diff: Sequence[TokenLogprob]
    """Log-probabilities of the new ids; empty if they were not requested."""
    result: Owner

    def __init__(self, result: Owner, sequence: SequenceState, index: int, taken: Extent) -> None:
        """Take what is new in `sequence` since the extent `taken`. The caller holds the result's lock."""
        finish = sequence.finish
        new_ids = sequence.token_ids[taken.num_tokens :]
        put = object.__setattr__  # frozen, as the class that it extends
        put(self, "_sequence", sequence)
        put(self, "result", result)
        put(self, "extent", Extent.of(sequence))
        put(self, "index", index)
        put(self, "text_diff", sequence.text_from(taken.num_chars))
        put(self, "token_ids_diff", new_ids if taken.is_end else result.prefix + new_ids)
        put(self, "logprobs_diff", sequence.logprobs[taken.num_logprobs :])
        put(self, "finish_reason", sequence.finish_reason)
        put(self, "matched_stop", None if finish is None else finish.matched)
        put(self, "cumulative_logprob", None if finish is None else finish.cumulative_logprob)
        put(self, "score", None if finish is None else finish.score)
        put(self, "usage", sequence.usage)
        put(self, "request_perf_metrics", None if finish is None else finish.perf_metrics)
        put(self, "trace_stamps", sequence.trace_stamps)
        put(self, "weight_version", "" if finish is None else finish.weight_version)

    def __getattr__(self, name: str) -> Any:
        """Assemble a field of the whole sequence on its first use. Python calls this for attributes that are
        not set.
        """
        put_together = _WHOLE.get(name)
        if put_together is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        with self.result.lock:
            value = put_together(self)
        object.__setattr__(self, name, value)
        return value

    @property
    def outputs(self) -> list[CompletionOutput]:
        """Return all sequences of the request, as far as they are received."""
        return list(self.result.outputs)

    @property
    def prompt_logprobs(self) -> PromptLogprobs:
        """Same as GenerationResult.prompt_logprobs."""
        return self.result.prompt_logprobs

    @property
    def context_logits(self) -> FloatArray | None:
        """Same as GenerationResult.context_logits."""
        return self.result.context_logits

    @property
    def additional_context_outputs(self) -> dict[str, FloatArray]:
        """Same as GenerationResult.additional_context_outputs."""
        return self.result.additional_context_outputs

    def _outputs(self) -> dict[str, FloatArray]:
        num_rows = self.extent.num_output_rows
        outputs = self._sequence.additional_outputs("generation") if num_rows else {}
        return {name: rows[:num_rows] for name, rows in outputs.items()}

    def _logits(self) -> FloatArray | None:
        rows = self._sequence.tensor("generation_logits") if self.extent.num_logits else None
        return None if rows is None else rows[: self.extent.num_logits]


_WHOLE: dict[str, Callable[[GenerationOutput], Any]] = {
    "text": lambda output: output._sequence.text[: output.extent.num_chars],
    "token_ids": lambda output: output.result.prefix + output._sequence.token_ids[: output.extent.num_tokens],
    "logprobs": lambda output: output._sequence.logprobs[: output.extent.num_logprobs],
    "generation_logits": GenerationOutput._logits,
    "additional_generation_outputs": GenerationOutput._outputs,
}
"""Fields that are assembled on first use."""
