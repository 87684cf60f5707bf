"""InferenceRequest: a request of the batch manager's callbacks (an id and named arrays), and its conversion
to a GenerationRequest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from carousel.client.core.request.request_builder import MAX_ID
from carousel.lora import LoraConfig
from carousel.prompt_tables import PromptTuningConfig
from carousel.trtllm.generation_request import MAX_UINT64, GenerationRequest
from runtime.base.errors import InvalidRequest
from runtime.sampling.columns import examples
from runtime.sampling.features import DRAWABLE
from runtime.sampling.kinds import Integer, Number, Stopping, WordsKind
from runtime.sampling.table import MAX_BEAMS, PARAMETERS
from runtime.wire.sampling_params import SamplingParams

TensorKind: TypeAlias = Literal["integer", "float", "boolean"]
WordList: TypeAlias = tuple[tuple[int, ...], ...]
DTYPES = {"integer": "iu", "float": "f", "boolean": "b"}
"""NumPy's letters for each TensorKind."""
NO_END = -1
"""Value of `end_id` with which no end token ends the output."""

ARRAYS = tuple(p for p in PARAMETERS if p.array)
# Name of the array -> field of SamplingParams, for those that hold one value, [1] or [1, 1].
INTEGERS = {p.array: p.name for p in ARRAYS if isinstance(p.kind, Integer | Stopping)}
FLOATS = {p.array: p.name for p in ARRAYS if isinstance(p.kind, Number)}
WORD_LISTS = {p.array: p.name for p in ARRAYS if isinstance(p.kind, WordsKind)}
"""Names of the arrays [1, 2, n] that hold words. The first row has the ids of all words one after the other,
the second the end of each word; unused places are -1.
"""
FLAGS = ("streaming", "return_log_probs", "return_context_logits", "return_generation_logits")
OTHERS = ("input_ids", "beam_width", "beam_width_array", "end_id", "pad_id", "top_p_reset_ids")
ADAPTERS = ("lora_task_id", "prompt_embedding_table")
SPELLINGS = {alias: p.array for p in ARRAYS for alias in p.aliases}
"""Other names of arrays -> name."""
OF_DRAW = frozenset(examples(DRAWABLE))
"""Names of the arrays that make a draw random. If none is given, the most likely id is taken."""
OF_BEAMS = {"length_penalty": 0.0, "early_stopping": 1, "beam_search_diversity_rate": 0.0}
"""Fields of SamplingParams that only a beam search uses -> TensorRT-LLM's default."""
KNOWN = frozenset({*INTEGERS, *FLOATS, *WORD_LISTS, *FLAGS, *OTHERS, *ADAPTERS})
WRITTEN_AS = {field: name for name, field in (INTEGERS | FLOATS | WORD_LISTS).items()}
WRITTEN_AS["stop_token_ids"] = "end_id"
ARRAY_NAMES = {
    **WRITTEN_AS,
    **dict.fromkeys(("prompt_token_ids", "prompt"), "input_ids"),
    **dict.fromkeys(("n", "use_beam_search"), "beam_width"),
    "logprobs": "return_log_probs",
    "lora_config": "lora_task_id",
    "prompt_tuning_config": "prompt_embedding_table",
}
"""Arguments of GenerationRequest and fields of SamplingParams -> name of the array."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    request_id: int
    """Id chosen by the caller, a 64-bit number. It may be used again after the request's final response."""
    inputs: Mapping[str, npt.ArrayLike]
    """Arrays by name; the first dimension of each is 1. `input_ids` and `request_output_len` are required."""

    def __post_init__(self) -> None:
        """Check the id and the type of `inputs`. Raises InvalidRequest for an id that is not of 64 bits, and
        if `inputs` has no names.
        """
        number = self.request_id
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_UINT64:
            raise InvalidRequest(
                f"request_id must be an integer from 0 to {MAX_UINT64}, got {number!r}", param="request_id"
            )
        if not isinstance(self.inputs, Mapping):
            raise InvalidRequest("inputs must map names to arrays", param="inputs")


class InputArrays:
    """Arrays of one request by their main names. Each is checked when it is read."""

    def __init__(self, inputs: Mapping[str, npt.ArrayLike]) -> None:
        """Store the arrays. Raises InvalidRequest for an unknown name, and for two names of one array."""
        self._arrays: dict[str, npt.ArrayLike] = {}
        given: dict[str, str] = {}
        for name, value in inputs.items():
            known = SPELLINGS.get(name, name)
            if known not in KNOWN:
                raise InvalidRequest(
                    f"{name} is not supported; the inputs are {', '.join(sorted(KNOWN))}", param=str(name)
                )
            if known in self._arrays:
                raise InvalidRequest(f"{name}: the same as {given[known]}; give one of them", param=name)
            self._arrays[known] = value
            given[known] = name

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def scalar(self, name: str, kind: TensorKind) -> Any:
        array = self._array(name, kind)
        if array.shape not in ((1,), (1, 1)):
            raise InvalidRequest(f"{name}: shape [1] or [1, 1], got {list(array.shape)}", param=name)
        return array.item()

    def ids(self, name: str) -> list[int]:
        """Return the ids of an array of shape [1, n]."""
        array = self._array(name, "integer")
        if array.ndim != 2 or array.shape[0] != 1 or array.shape[1] == 0:
            raise InvalidRequest(f"{name}: shape [1, n], got {list(array.shape)}", param=name)
        ids: list[int] = array[0].tolist()
        if min(ids) < 0 or max(ids) > MAX_ID:
            raise InvalidRequest(f"{name}: token ids must be from 0 to {MAX_ID}", param=name)
        return ids

    def matrix(self, name: str) -> npt.NDArray[Any]:
        """Return the vectors of an array of shape [1, n, width]."""
        array = self._array(name, "float")
        if array.ndim != 3 or array.shape[0] != 1:
            raise InvalidRequest(f"{name}: shape [1, n, width], got {list(array.shape)}", param=name)
        vectors: npt.NDArray[Any] = array[0]
        return vectors

    def words(self, name: str) -> WordList:
        """Return the word ids of an array of shape [1, 2, n]."""
        array = self._array(name, "integer")
        if array.ndim != 3 or array.shape[:2] != (1, 2):
            raise InvalidRequest(f"{name}: shape [1, 2, n], got {list(array.shape)}", param=name)
        ids, ends = array[0].tolist()
        words = []
        start = 0
        for end in ends:
            if end < 0:
                break
            if not start < end <= len(ids):
                raise InvalidRequest(
                    f"{name}: a word ends at {end}, after {start}; there are {len(ids)} ids", param=name
                )
            words.append(tuple(ids[start:end]))
            start = end
        return tuple(words)

    def _array(self, name: str, kind: TensorKind) -> npt.NDArray[Any]:
        if name not in self._arrays:
            raise InvalidRequest(f"{name} is missing", param=name)
        try:
            array = np.asarray(self._arrays[name])
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}: no array: {error}", param=name) from None
        if array.dtype.kind not in DTYPES[kind]:
            raise InvalidRequest(f"{name}: {kind} values, got {array.dtype}", param=name)
        return array


def generation_request(arrays: InputArrays, *, has_context: bool, has_generation: bool) -> GenerationRequest:
    """Return the request for the arrays. Logits that the runtime does not gather, as the last two arguments
    say, are left out: the response has a dummy in their place.

    Raises: InvalidRequest that names the array.
    """
    flags = {name: name in arrays and arrays.scalar(name, "boolean") for name in FLAGS}
    fields: dict[str, Any] = {
        "return_context_logits": flags["return_context_logits"] and has_context,
        "return_generation_logits": flags["return_generation_logits"] and has_generation,
        "logprobs": 0 if flags["return_log_probs"] else None,
    }
    if not any(name in arrays for name in OF_DRAW):
        fields["temperature"] = 0.0
    fields |= {field: arrays.scalar(name, "integer") for name, field in INTEGERS.items() if name in arrays}
    fields |= {field: arrays.scalar(name, "float") for name, field in FLOATS.items() if name in arrays}
    fields |= {field: arrays.words(name) for name, field in WORD_LISTS.items() if name in arrays}
    fields["max_tokens"] = arrays.scalar("request_output_len", "integer")
    if "top_p_reset_ids" in arrays:
        fields["top_p_reset_ids"] = tuple(arrays.ids("top_p_reset_ids"))
    if "end_id" in arrays:
        end_id = arrays.scalar("end_id", "integer")
        fields |= {"ignore_eos": True, "stop_token_ids": () if end_id == NO_END else (end_id,)}
    fields |= _beams(arrays, fields)
    sampling = SamplingParams(**fields)
    try:
        sampling.validate()
    except InvalidRequest as error:
        name = WRITTEN_AS.get(error.param or "", error.param)
        raise InvalidRequest(f"{name}: {error.message}", param=name, code=error.code) from None
    options: dict[str, Any] = {}
    if "lora_task_id" in arrays:
        options["lora_config"] = LoraConfig(arrays.scalar("lora_task_id", "integer"))
    if "prompt_embedding_table" in arrays:
        options["prompt_tuning_config"] = PromptTuningConfig(arrays.matrix("prompt_embedding_table"))
    return GenerationRequest(arrays.ids("input_ids"), sampling, streaming=flags["streaming"], **options)


def _beams(arrays: InputArrays, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a beam search, all of whose beams are returned. Raises InvalidRequest."""
    widths = arrays.ids("beam_width_array") if "beam_width_array" in arrays else []
    width = arrays.scalar("beam_width", "integer") if "beam_width" in arrays else max(widths, default=1)
    if width == 1:
        for field in OF_BEAMS:
            if field in fields:
                name = WRITTEN_AS[field]
                raise InvalidRequest(f"{name}: with one beam it means nothing; leave it out", param=name)
        return {}
    if not 1 < width <= MAX_BEAMS:
        name = "beam_width" if "beam_width" in arrays else "beam_width_array"
        raise InvalidRequest(f"{name}: 1 to {MAX_BEAMS} beams, got {width}", param=name)
    search: dict[str, Any] = {"use_beam_search": True, "beam_width": width, "n": width}
    search["beam_width_array"] = tuple(widths)
    search |= {field: value for field, value in OF_BEAMS.items() if field not in fields}
    if "early_stopping" in fields:
        search["early_stopping"] = Stopping().accept("early_stopping", fields["early_stopping"])
    return search


def padding_id(arrays: InputArrays) -> int:
    """Return the id that fills the unused end of `output_ids`: `pad_id`, else `end_id`, else 0. Raises
    InvalidRequest.
    """
    for name in ("pad_id", "end_id"):
        if name in arrays:
            value: int = arrays.scalar(name, "integer")
            if not NO_END <= value <= MAX_ID:
                raise InvalidRequest(f"{name}: {value} is no token id", param=name)
            return value
    return 0
