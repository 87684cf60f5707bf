"""Response and Result: the new output of one enqueued request, in TensorRT-LLM's words. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from carousel.client.core.result import FinishReason
from carousel.trtllm.generation_output import GenerationOutput
from carousel.trtllm.generation_request import GenerationRequest
from runtime.base.errors import CarouselError
from runtime.wire.format import FloatArray
from runtime.wire.messages import Usage
from runtime.wire.perf_metrics import RequestPerfMetrics


@dataclass(frozen=True, slots=True)
class AdditionalOutput:
    """Rows of one additional output: of the output tokens under its name, of the prompt under `context_` and
    its name.
    """

    name: str
    output: FloatArray = field(compare=False)
    """Rows [1, output tokens except the last, width], or [prompt tokens, width] of the prompt."""


@dataclass(frozen=True, slots=True)
class Result:
    """Output of one sequence. The outer lists have one entry for each beam: one, unless the request is a beam
    search, whose whole output is one result, best first.
    """

    sequence_index: int
    """Number of the sequence among the request's `n`; 0 for a beam search."""
    is_sequence_final: bool
    """True for the last result of its sequence."""
    is_final: bool
    """True for the last result of its request."""
    output_token_ids: list[list[int]]
    """Token ids [beams][tokens]. Of a stream the new ones, unless the request returns all or is a beam
    search; otherwise all.
    """
    text: str
    """Text of the first beam's tokens. It is held back while they do not form whole characters, and in a beam
    search until the end.
    """
    log_probs: list[list[float]] | None = None
    """Log-probabilities [beams][tokens], one for each generated token of output_token_ids; None if they were
    not requested.
    """
    cum_log_probs: list[float] | None = None
    """Sums [beams] of log-probabilities over whole sequences, with the last result, for a beam search or if
    logprobs were requested.
    """
    finish_reason: FinishReason | None = None
    """Reason for which the first beam ended, with the last result of the sequence."""
    finish_reasons: list[FinishReason] = field(default_factory=list)
    """Reasons [beams] for which each beam ended, with the last result of the sequence."""
    stop_reason: str | int | None = None
    """Cause of the finish_reason "stop": a stop string, the text of a stop word, or a stop token id."""
    usage: Usage | None = None
    """Usage of the sequence, or of all beams together, with its last result."""
    context_logits: FloatArray | None = field(default=None, compare=False)
    """Raw logits [input tokens, vocabulary], with the last result of each sequence, if requested."""
    generation_logits: FloatArray | None = field(default=None, compare=False)
    """Raw logits [1, output tokens, vocabulary], with the last result of the sequence, if requested."""
    request_perf_metrics: RequestPerfMetrics | None = None
    """Times and pages of the sequence, with its last result, if requested."""
    additional_outputs: list[AdditionalOutput] = field(default_factory=list)
    """Additional outputs of the sequence, with its last result, if requested."""


@dataclass(frozen=True, slots=True)
class Response:
    """A result of one request, or the error that ended it."""

    request_id: int
    client_id: int | None
    """Id that the caller gave the request."""
    error: CarouselError | None = None
    _result: Result | None = None

    @property
    def is_final(self) -> bool:
        """Return True for the last response of its request."""
        return self._result is None or self._result.is_final

    def has_error(self) -> bool:
        """Return True if the request has failed."""
        return self.error is not None

    def get_result(self) -> Result:
        """Return the result. Raises the error if the request ended with one."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        assert self._result is not None
        return self._result

    @property
    def result(self) -> Result:
        """Same as `get_result`."""
        return self.get_result()

    @property
    def error_msg(self) -> str:
        """Return the error's text. Raises RuntimeError if there is a result instead."""
        if self.error is None:
            raise RuntimeError(f"request {self.request_id} has a result here, and no error")
        return str(self.error)


def response_of(request: GenerationRequest, output: GenerationOutput, *, is_final: bool) -> Response:
    """Return the response for an output of a sequence."""
    is_sequence_final = output.finish_reason is not None
    whole = request.return_all_generated_tokens
    logprobs = None
    if request.sampling_params.logprobs is not None:
        logprobs = [each.logprob for each in (output.logprobs if whole else output.logprobs_diff)]
    total = None if logprobs is None else output.cumulative_logprob
    logits = output.generation_logits if is_sequence_final else None
    result = Result(
        sequence_index=output.index,
        is_sequence_final=is_sequence_final,
        is_final=is_final,
        output_token_ids=[output.token_ids if whole else output.token_ids_diff],
        text=output.text if whole else output.text_diff,
        log_probs=None if logprobs is None else [logprobs],
        cum_log_probs=None if total is None else [total],
        finish_reason=output.finish_reason,
        finish_reasons=[] if output.finish_reason is None else [output.finish_reason],
        stop_reason=output.stop_reason,
        usage=output.usage,
        context_logits=output.context_logits if is_sequence_final else None,
        generation_logits=None if logits is None else logits[None],
        request_perf_metrics=output.request_perf_metrics,
        additional_outputs=_outputs(request, output) if is_sequence_final else [],
    )
    return Response(request.id, request.client_id, None, result)


def response_of_beams(
    request: GenerationRequest, beams: Sequence[GenerationOutput], usage: Usage | None
) -> Response:
    """Return the response with all that a beam search has found, best first."""
    best = beams[0]
    log_probs = None
    if request.sampling_params.logprobs is not None:
        log_probs = [[each.logprob for each in beam.logprobs] for beam in beams]
    sums = [beam.cumulative_logprob for beam in beams]
    result = Result(
        sequence_index=0,
        is_sequence_final=True,
        is_final=True,
        output_token_ids=[beam.token_ids for beam in beams],
        text=best.text,
        log_probs=log_probs,
        cum_log_probs=[0.0 if each is None else each for each in sums],
        finish_reason=best.finish_reason,
        finish_reasons=[beam.finish_reason for beam in beams if beam.finish_reason is not None],
        stop_reason=best.stop_reason,
        usage=usage,
        request_perf_metrics=best.request_perf_metrics,
    )
    return Response(request.id, request.client_id, None, result)


def response_of_hypotheses(request: GenerationRequest, token_ids: list[list[int]]) -> Response:
    """Return the response with the state of a running beam search, best first: all ids, which may change."""
    result = Result(
        sequence_index=0, is_sequence_final=False, is_final=False, output_token_ids=token_ids, text=""
    )
    return Response(request.id, request.client_id, None, result)


def _outputs(request: GenerationRequest, output: GenerationOutput) -> list[AdditionalOutput]:
    """Return the additional outputs of a sequence, with those of the prompt if they were requested."""
    if not request.sampling_params.additional_outputs:
        return []
    unwanted = {each.name for each in request.additional_model_outputs if not each.gather_context}
    context, rows = output.additional_context_outputs, output.additional_generation_outputs
    return [
        *(AdditionalOutput(name, each[None]) for name, each in rows.items()),
        *(
            AdditionalOutput(f"context_{name}", each)
            for name, each in context.items()
            if name not in unwanted
        ),
    ]
