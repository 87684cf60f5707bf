"""Output tensors of a batch manager's response: names, shapes and types, made from the executor's results."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from carousel.trtllm.generation_request import GenerationRequest
from carousel.trtllm.responses import Result


class NamedTensor(NamedTuple):
    name: str
    tensor: npt.NDArray[Any]


class OutputTensors:
    """Makes the tensors of one request for all its responses."""

    def __init__(self, request: GenerationRequest, *, padding_id: int, max_len: int) -> None:
        """Start without any output. max_len is the model's longest sequence, input and output together."""
        self._request = request
        self._padding_id = padding_id
        num_input = len(request.input_token_ids)
        self._num_tokens = [num_input] * _num_beams(request)
        # A wish beyond the context is cut to it; so is the room for its output.
        max_tokens = request.sampling_params.max_tokens
        wanted = max_len if max_tokens is None else num_input + max_tokens
        self._max_len = max(num_input, min(wanted, max_len))
        self._cum_log_probs = [0.0] * len(self._num_tokens)

    def of(self, result: Result) -> list[NamedTensor]:
        """The next response's, in this order, on the host. There is one beam unless the request searches:

        output_ids        int32 [1, beams, max_len], the input and the output, filled up with the padding id;
                          of a stream [1, 1, new tokens], or of a search [1, beams, tokens of the longest so
                          far], filled up, without the input
        sequence_length   int32 [1, beams], input and output so far
        context_logits    float32 [1, input tokens, vocabulary] with the last response; else [1, 1, 1]
        generation_logits float32 [1, 1, output tokens, vocabulary] with the last response; else [1, 1, 1, 1]
        output_log_probs  float32 [1, beams, new tokens of the longest]; 0 behind the end of a shorter one,
                          and when not asked for
        cum_log_probs     float32 [1, beams], of the output so far; 0 when not asked for, but of a search
        """
        beams = result.output_token_ids
        log_probs = np.zeros((1, len(beams), max(map(len, beams))), np.float32)
        if self._request.sampling_params.use_beam_search:  # each response has all of it
            self._num_tokens = [len(self._request.input_token_ids)] * len(beams)
        for beam, new_ids in enumerate(beams):
            self._num_tokens[beam] += len(new_ids)
            if result.log_probs is not None:
                log_probs[0, beam, : len(new_ids)] = result.log_probs[beam]
                self._cum_log_probs[beam] += sum(result.log_probs[beam])
        if len(beams) > 1 and result.cum_log_probs is not None:
            self._cum_log_probs = result.cum_log_probs
        context, generation = result.context_logits, result.generation_logits
        return [
            NamedTensor("output_ids", self._output_ids(beams)),
            NamedTensor("sequence_length", np.array([self._num_tokens], np.int32)),
            NamedTensor("context_logits", _dummy(3) if context is None else context[None]),
            NamedTensor("generation_logits", _dummy(4) if generation is None else generation[None]),
            NamedTensor("output_log_probs", log_probs),
            NamedTensor("cum_log_probs", np.array([self._cum_log_probs], np.float32)),
        ]

    def _output_ids(self, beams: list[list[int]]) -> npt.NDArray[np.int32]:
        if self._request.streaming:
            whole, max_len = beams, max(map(len, beams))
        else:
            whole = [self._request.input_token_ids + new_ids for new_ids in beams]
            max_len = max(self._max_len, *map(len, whole))
        output_ids = np.full((1, len(beams), max_len), self._padding_id, np.int32)
        for beam, ids in enumerate(whole):
            output_ids[0, beam, : len(ids)] = ids
        return output_ids


def _num_beams(request: GenerationRequest) -> int:
    """Return the number of beams in a response."""
    sampling = request.sampling_params
    return sampling.n if sampling.use_beam_search else 1


def _dummy(num_dimensions: int) -> npt.NDArray[np.float32]:
    return np.zeros((1,) * num_dimensions, np.float32)
