"""The output tensors of a batch manager's response: names, shapes and types, from the executor's results."""

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
    """Tensors of one request, over all its responses."""

    def __init__(self, request: GenerationRequest, *, padding_id: int, max_len: int) -> None:
        """max_len: longest sequence, input and output, that the model takes."""
        self._request = request
        self._padding_id = padding_id
        num_input = len(request.input_token_ids)
        self._num_tokens = num_input
        # A wish beyond the context is cut to it; so is the room for its output.
        max_tokens = request.sampling_params.max_tokens
        wanted = max_len if max_tokens is None else num_input + max_tokens
        self._max_len = max(num_input, min(wanted, max_len))
        self._cum_log_prob = 0.0

    def of(self, result: Result) -> list[NamedTensor]:
        """The next response's, in this order, on the host:

        output_ids        int32 [1, 1, max_len], the input and the output, filled up with the padding id; of a
                          stream [1, 1, new tokens]
        sequence_length   int32 [1, 1], input and output so far
        context_logits    float32 [1, input tokens, vocabulary] with the last response; else [1, 1, 1]
        generation_logits float32 [1, 1, output tokens, vocabulary] with the last response; else [1, 1, 1, 1]
        output_log_probs  float32 [1, 1, new tokens]; 0 when not asked for
        cum_log_probs     float32 [1, 1], of the output so far; 0 when not asked for
        """
        (new_ids,) = result.output_token_ids
        self._num_tokens += len(new_ids)
        log_probs = np.zeros((1, 1, len(new_ids)), np.float32)
        if result.log_probs is not None:
            log_probs[0] = result.log_probs
            self._cum_log_prob += sum(result.log_probs[0])
        context, generation = result.context_logits, result.generation_logits
        return [
            NamedTensor("output_ids", self._output_ids(new_ids)),
            NamedTensor("sequence_length", np.array([[self._num_tokens]], np.int32)),
            NamedTensor("context_logits", _dummy(3) if context is None else context[None]),
            NamedTensor("generation_logits", _dummy(4) if generation is None else generation[None]),
            NamedTensor("output_log_probs", log_probs),
            NamedTensor("cum_log_probs", np.array([[self._cum_log_prob]], np.float32)),
        ]

    def _output_ids(self, new_ids: list[int]) -> npt.NDArray[np.int32]:
        if self._request.streaming:
            return np.array(new_ids, np.int32).reshape(1, 1, -1)
        ids = self._request.input_token_ids + new_ids
        padding = [self._padding_id] * (self._max_len - len(ids))
        return np.array(ids + padding, np.int32).reshape(1, 1, -1)


def _dummy(num_dimensions: int) -> npt.NDArray[np.float32]:
    return np.zeros((1,) * num_dimensions, np.float32)
