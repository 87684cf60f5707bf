"""The named arrays of the batch manager's requests, and the tensors of its responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from carousel.trtllm.generation_request import GenerationRequest
from carousel.trtllm.inference_request import InferenceRequest, InputArrays, generation_request, padding_id
from carousel.trtllm.output_tensors import OutputTensors
from carousel.trtllm.responses import Result
from runtime.base.errors import InvalidRequest
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each


class Unreadable:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("not on this device")


def ids(*values: int) -> Any:
    return np.array([values], np.int32)


def one(value: Any) -> Any:
    kind = {bool: np.bool_, int: np.int32, float: np.float32}[type(value)]
    return np.array([[value]], kind)


def words(*given: list[int], room: int = 0) -> Any:
    """[1, 2, n], as TensorRT-LLM's to_word_list_format makes it."""
    flat = [each for word in given for each in word]
    ends = np.cumsum([len(word) for word in given]).tolist()
    size = max(len(flat), room)
    return np.array([[flat + [0] * (size - len(flat)), ends + [-1] * (size - len(ends))]], np.int32)


def converted(**inputs: Any) -> GenerationRequest:
    inputs = {"input_ids": ids(1, 2), "request_output_len": one(5)} | inputs
    return generation_request(InputArrays(inputs), has_context=True, has_generation=True)


@pytest.mark.parametrize("request_id", [0, 7, (1 << 64) - 1])
def test_every_number_of_64_bits_is_an_id(request_id: int) -> None:
    assert InferenceRequest(request_id, {}).request_id == request_id


@for_each("request_id", [-1, 1 << 64, 1.0, "7", True, None])
def test_nothing_else_is_an_id(request_id: Any) -> None:
    with pytest.raises(InvalidRequest, match="request_id"):
        InferenceRequest(request_id, {})


def test_inputs_have_names() -> None:
    with pytest.raises(InvalidRequest, match="inputs"):
        InferenceRequest(1, [ids(1)])  # type: ignore[arg-type]


def test_the_needed_arrays_alone_ask_for_the_most_likely_tokens() -> None:
    request = converted()
    assert request.prompt_token_ids == [1, 2]
    assert request.sampling_params == SamplingParams(max_tokens=5, temperature=0.0)
    assert not request.streaming


@for_each(
    ("name", "array", "field", "wanted"),
    [
        ("request_output_len", one(9), "max_tokens", 9),
        ("temperature", one(0.5), "temperature", 0.5),
        ("top_k", one(3), "top_k", 3),
        ("runtime_top_k", one(3), "top_k", 3),
        ("top_p", one(0.5), "top_p", 0.5),
        ("runtime_top_p", one(0.5), "top_p", 0.5),
        ("min_p", one(0.25), "min_p", 0.25),
        ("top_n_sigma", one(1.5), "top_n_sigma", 1.5),
        ("seed", np.array([7], np.uint64), "seed", 7),
        ("random_seed", one(7), "seed", 7),
        ("random_seed", np.array([[(1 << 64) - 1]], np.uint64), "seed", (1 << 64) - 1),
        ("min_length", one(2), "min_tokens", 2),
        ("min_tokens", one(2), "min_tokens", 2),
        ("repetition_penalty", one(1.5), "repetition_penalty", 1.5),
        ("presence_penalty", one(0.5), "presence_penalty", 0.5),
        ("frequency_penalty", one(0.5), "frequency_penalty", 0.5),
        ("no_repeat_ngram_size", one(2), "no_repeat_ngram_size", 2),
        ("top_p_decay", one(0.5), "top_p_decay", 0.5),
        ("top_p_min", one(0.25), "top_p_min", 0.25),
        ("top_p_reset_ids", ids(3, 4), "top_p_reset_ids", (3, 4)),
        ("return_log_probs", one(True), "logprobs", 0),
        ("return_log_probs", one(False), "logprobs", None),
        ("return_context_logits", one(True), "return_context_logits", True),
        ("return_generation_logits", one(True), "return_generation_logits", True),
        ("stop_words_list", words([4], [5, 6]), "stop_words_ids", ((4,), (5, 6))),
        ("bad_words_list", words([4, 5, 6], room=8), "bad_words_ids", ((4, 5, 6),)),
        ("bad_words_list", words(room=1), "bad_words_ids", ()),
        ("end_id", one(4), "stop_token_ids", (4,)),
        ("end_id", one(-1), "stop_token_ids", ()),
    ],
)
def test_an_array_becomes_a_sampling_parameter(name: str, array: Any, field: str, wanted: Any) -> None:
    assert getattr(converted(**{name: array}).sampling_params, field) == wanted


def test_an_end_id_takes_the_place_of_the_models_own() -> None:
    assert converted(end_id=one(4)).sampling_params.ignore_eos
    assert not converted().sampling_params.ignore_eos


def test_streaming_and_a_single_beam_are_arrays_too() -> None:
    assert converted(streaming=one(True), beam_width=one(1)).streaming


@pytest.mark.parametrize(
    ("arrays", "penalty", "stopping"),
    [({}, 0.0, 1), ({"len_penalty": one(0.5)}, 0.5, 1), ({"early_stopping": one(7)}, 0.0, 2)],
)
def test_all_beams_are_the_result_by_the_executors_defaults(
    arrays: dict[str, Any], penalty: float, stopping: int
) -> None:
    sampling = converted(beam_width=one(4), **arrays).sampling_params
    assert (sampling.num_beams, sampling.n, sampling.temperature) == (4, 4, 0.0)
    assert (sampling.length_penalty, sampling.early_stopping) == (penalty, stopping)


def test_widths_and_diversity_are_arrays() -> None:
    rate = one(0.5)
    sampling = converted(beam_width_array=ids(2, 4), beam_search_diversity_rate=rate).sampling_params
    assert (sampling.num_beams, sampling.n, sampling.beam_width_array) == (4, 4, (2, 4))
    assert sampling.beam_search_diversity_rate == 0.5


def test_logits_that_the_runtime_does_not_gather_are_left_out() -> None:
    arrays = InputArrays(
        {
            "input_ids": ids(1),
            "request_output_len": one(5),
            "return_context_logits": one(True),
            "return_generation_logits": one(True),
        }
    )
    for has_context, has_generation in ((False, True), (True, False)):
        sampling = generation_request(
            arrays, has_context=has_context, has_generation=has_generation
        ).sampling_params
        wants = (sampling.return_context_logits, sampling.return_generation_logits)
        assert wants == (has_context, has_generation)


@for_each(
    ("name", "array"),
    [
        ("input_ids", np.array([1, 2], np.int32)),
        ("input_ids", np.zeros((1, 0), np.int32)),
        ("input_ids", np.zeros((2, 3), np.int32)),
        ("input_ids", np.zeros((1, 3), np.float32)),
        ("input_ids", [[1, 2], [3]]),
        ("input_ids", "text"),
        ("input_ids", None),
        ("input_ids", Unreadable()),
        ("input_ids", np.array([[1 << 40]])),
        ("request_output_len", one(0)),
        ("request_output_len", np.int32(5)),
        ("request_output_len", np.array([5, 6], np.int32)),
        ("request_output_len", one(5.0)),
        ("temperature", one(1)),
        ("temperature", one(-1.0)),
        ("top_p", one(0.0)),
        ("seed", np.array([7.0])),
        ("streaming", one(1)),
        ("beam_width", one(0)),
        ("beam_width", one(65)),
        ("len_penalty", one(0.5)),
        ("early_stopping", one(1)),
        ("beam_search_diversity_rate", one(0.5)),
        ("beam_width_array", ids(2, 65)),
        ("end_id", one(-2)),
        ("pad_id", one(-2)),
        ("stop_words_list", ids(1, 2)),
        ("stop_words_list", np.array([[[1, 2], [3, -1]]], np.int32)),
        ("stop_words_list", np.array([[[1, 2], [2, 1]]], np.int32)),
        ("bad_words_list", np.array([[[1, 2], [0, -1]]], np.int32)),
        ("bad_words_list", np.array([[[-1, 2], [2, -1]]], np.int32)),
        ("embedding_bias", one(1.0)),
        ("max_tokens", one(1)),
    ],
)
def test_a_wrong_array_is_refused_by_its_name(name: str, array: Any) -> None:
    def convert() -> None:
        converted(**{name: array})
        padding_id(InputArrays({name: array}))

    with pytest.raises(InvalidRequest, match=name) as caught:
        convert()
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["input_ids", "request_output_len"])
def test_what_is_needed_must_be_there(name: str) -> None:
    inputs = {"input_ids": ids(1, 2), "request_output_len": one(5)}
    del inputs[name]
    with pytest.raises(InvalidRequest, match=f"{name} is missing"):
        generation_request(InputArrays(inputs), has_context=True, has_generation=True)


def test_one_array_has_one_name() -> None:
    for first, second in (("top_k", "runtime_top_k"), ("runtime_top_k", "top_k")):
        with pytest.raises(InvalidRequest, match=f"^{second}: the same as {first}; give one of them"):
            InputArrays({first: one(3), second: one(3)})


def test_the_padding_is_the_pad_id_else_the_end_id_else_zero() -> None:
    assert padding_id(InputArrays({"pad_id": one(5), "end_id": one(6)})) == 5
    assert padding_id(InputArrays({"end_id": one(6)})) == 6
    assert padding_id(InputArrays({})) == 0


def result_of(*new_ids: int, **fields: Any) -> Result:
    return Result(0, fields.pop("final", True), True, [list(new_ids)], "", **fields)


def request_of(max_tokens: int, *, streaming: bool = False) -> GenerationRequest:
    return GenerationRequest([1, 2, 3], SamplingParams(max_tokens=max_tokens), streaming=streaming)


def test_a_whole_response_is_padded_input_and_output_with_dummies_for_what_was_not_asked() -> None:
    tensors = OutputTensors(request_of(5), padding_id=9, max_len=64).of(result_of(4, 5))
    assert [each.name for each in tensors] == [
        "output_ids",
        "sequence_length",
        "context_logits",
        "generation_logits",
        "output_log_probs",
        "cum_log_probs",
    ]
    by_name = dict(tensors)
    assert by_name["output_ids"].tolist() == [[[1, 2, 3, 4, 5, 9, 9, 9]]]
    assert by_name["sequence_length"].tolist() == [[5]]
    assert by_name["context_logits"].tolist() == [[[0.0]]]
    assert by_name["generation_logits"].tolist() == [[[[0.0]]]]
    assert by_name["output_log_probs"].tolist() == [[[0.0, 0.0]]]
    assert by_name["cum_log_probs"].tolist() == [[0.0]]
    assert [each.tensor.dtype for each in tensors] == [np.int32, np.int32, *[np.float32] * 4]


def test_there_is_no_more_padding_than_the_context_has_room() -> None:
    tensors = dict(OutputTensors(request_of(1 << 24), padding_id=0, max_len=6).of(result_of(4)))
    assert tensors["output_ids"].shape == (1, 1, 6)


def test_logits_and_log_probs_keep_their_shapes() -> None:
    context = np.ones((3, 7), np.float32)
    generated = np.ones((1, 2, 7), np.float32)
    result = result_of(4, 5, log_probs=[[-1.0, -2.0]], context_logits=context, generation_logits=generated)
    tensors = dict(OutputTensors(request_of(5), padding_id=0, max_len=64).of(result))
    assert tensors["context_logits"].shape == (1, 3, 7)
    assert tensors["generation_logits"].shape == (1, 1, 2, 7)
    assert tensors["output_log_probs"].tolist() == [[[-1.0, -2.0]]]
    assert tensors["cum_log_probs"].tolist() == [[-3.0]]


def test_beams_are_padded_each_to_the_longest_output() -> None:
    search = SamplingParams(max_tokens=3, use_beam_search=True, beam_width=3, n=2)
    result = Result(
        0, True, True, [[4], [5, 6]], "", log_probs=[[-1.0], [-2.0, -0.5]], cum_log_probs=[-1.0, -2.5]
    )
    tensors = dict(OutputTensors(GenerationRequest([1], search), padding_id=9, max_len=64).of(result))
    assert tensors["output_ids"].tolist() == [[[1, 4, 9, 9], [1, 5, 6, 9]]]
    assert tensors["sequence_length"].tolist() == [[2, 3]]
    assert tensors["output_log_probs"].tolist() == [[[-1.0, 0.0], [-2.0, -0.5]]]
    assert tensors["cum_log_probs"].tolist() == [[-1.0, -2.5]]


def test_a_streamed_search_has_all_tokens_so_far_in_each_response() -> None:
    search = SamplingParams(max_tokens=3, use_beam_search=True, beam_width=3, n=2)
    request = GenerationRequest([1], search, streaming=True)
    outputs = OutputTensors(request, padding_id=9, max_len=64)
    for beams, is_final in (([[4], [5]], False), ([[5, 6], [4]], True)):
        tensors = dict(outputs.of(Result(0, is_final, is_final, beams, "")))
    assert tensors["output_ids"].tolist() == [[[5, 6], [4, 9]]]
    assert tensors["sequence_length"].tolist() == [[3, 2]]


def test_a_streamed_response_has_the_new_tokens_and_the_sums_so_far() -> None:
    outputs = OutputTensors(request_of(5, streaming=True), padding_id=0, max_len=64)
    responses = [
        dict(outputs.of(result_of(4, log_probs=[[-1.0]]))),
        dict(outputs.of(result_of(5, 6, log_probs=[[-0.5, -0.25]]))),
        dict(outputs.of(result_of(log_probs=[[]]))),
    ]
    assert [each["output_ids"].tolist() for each in responses] == [[[[4]]], [[[5, 6]]], [[[]]]]
    assert [each["sequence_length"].item() for each in responses] == [4, 6, 6]
    assert [each["cum_log_probs"].item() for each in responses] == [-1.0, -1.75, -1.75]
    assert [each["output_log_probs"].shape for each in responses] == [(1, 1, 1), (1, 1, 2), (1, 1, 0)]


def test_adapters_by_their_number_and_vectors_of_virtual_tokens() -> None:
    inputs: dict[str, Any] = {"input_ids": [[1, 9]], "request_output_len": [3], "lora_task_id": [5]}
    table = np.ones((1, 2, 4), np.float32)
    request = generation_request(
        InputArrays({**inputs, "prompt_embedding_table": table}), has_context=False, has_generation=False
    )
    assert request.lora_config is not None
    assert (request.lora_config.task_id, request.lora_config.weights) == (5, None)
    assert request.prompt_tuning_config is not None
    assert request.prompt_tuning_config.embedding_table.shape == (2, 4)
    for name, value in (
        ("prompt_embedding_table", table[0]),
        ("lora_weights", table),
        ("lora_task_id", [0.5]),
    ):
        with pytest.raises(InvalidRequest, match=name):
            generation_request(
                InputArrays({**inputs, name: value}), has_context=False, has_generation=False
            ).check()
