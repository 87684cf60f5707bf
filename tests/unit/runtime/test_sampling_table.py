"""The table of sampling parameters, and what is made of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from runtime.sampling.columns import FLOATS, INTEGERS, ROW_BYTES, ROW_DTYPE, examples
from runtime.sampling.features import FEATURE_BITS, NOISE, OF_DRAW
from runtime.sampling.generate import BLOCKS, MARKER, ROOT, Block, written
from runtime.sampling.kinds import Number
from runtime.sampling.table import PARAMETERS, Parameter
from runtime.wire.plan import RowSetup
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each
from tests.harness.row_setups import numbers_of

WITH_EXAMPLE = [p for p in PARAMETERS if p.example is not None]


@for_each("block", BLOCKS)
def test_text_in_other_files_is_what_the_table_says(block: Block) -> None:
    text = (ROOT / block.path).read_text()
    assert written(text, block) == text, "run python -m runtime.sampling.generate"


def test_a_block_replaces_what_stands_between_its_markers_alone() -> None:
    block = Block("x.h", lambda: ["int new;"])
    text = f"before\n// {MARKER}: begin.\nint old;\nint more;\n// {MARKER}: end.\nbehind\n"
    assert written(text, block) == f"before\n// {MARKER}: begin.\nint new;\n// {MARKER}: end.\nbehind\n"
    with pytest.raises(ValueError, match=r"x\.h"):
        written("int old;\n", block)


def test_the_rows_are_the_fields_of_sampling_params_in_their_order() -> None:
    assert [p.name for p in PARAMETERS] == list(SamplingParams.__struct_fields__)
    assert [p.neutral for p in PARAMETERS] == list(SamplingParams.__struct_defaults__)


ARGUMENTS = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "logit_bias", "logprobs", "n", "best_of"),
    *("stop_words_ids", "bad_words", "bad_words_ids", "allowed_token_ids", "no_repeat_ngram_size"),
    *("top_p_decay", "top_p_min", "top_p_reset_ids", "prompt_logprobs", "return_context_logits"),
    *("return_generation_logits", "return_perf_metrics", "prompt_logprobs_start"),
    *("truncate_prompt_tokens", "top_n_sigma"),
)
"""Positions by which callers may have given them; further ones come behind."""


def test_arguments_keep_their_positions() -> None:
    assert SamplingParams.__struct_fields__[: len(ARGUMENTS)] == ARGUMENTS


def test_default_and_example_are_values_that_may_be_asked_for() -> None:
    for p in PARAMETERS:
        p.check(p.neutral)
        if p.example is not None:
            p.check(p.example)
            assert p.doc, p.name


@for_each("p", WITH_EXAMPLE)
def test_an_example_needs_its_features_and_neutral_values_draw_alone(p: Parameter) -> None:
    plain = RowSetup.of(0, 1, SamplingParams())
    assert plain.features == NOISE
    bits = p.feature(p.example)
    assert 0 < bits < 1 << FEATURE_BITS
    setup = RowSetup.of(0, 1, SamplingParams(**{p.name: p.example}))
    assert setup.features == NOISE | bits
    assert setup != plain
    assert p.name in examples(bits)
    greedy = RowSetup.of(0, 1, SamplingParams(**{"temperature": 0.0, p.name: p.example}))
    if p.name != "temperature":
        assert greedy.features == bits & ~OF_DRAW


def test_a_row_is_packed_as_its_layout_says() -> None:
    setup = RowSetup.of(
        3, 5, SamplingParams(seed=(1 << 63) - 1, min_tokens=2, top_p=0.5, logprobs=2), min_len=7
    )
    assert len(setup.columns) == ROW_BYTES == ROW_DTYPE.itemsize == 8 * len((*FLOATS, *INTEGERS))
    numbers = numbers_of(setup)
    assert (numbers.seed, numbers.top_p, numbers.num_logprobs) == ((1 << 63) - 1, 0.5, 2)
    assert (numbers.min_len, numbers.is_greedy, numbers.top_k) == (7, 0, 0)
    names = [c.name for c in (*FLOATS, *INTEGERS)]
    assert len(set(names)) == len(names)


def test_a_top_n_sigma_below_float32_keeps_few_ids_and_not_all() -> None:
    setup = RowSetup.of(0, 1, SamplingParams(top_n_sigma=1e-300))
    assert np.float32(numbers_of(setup).top_n_sigma) > 0
    assert numbers_of(RowSetup.of(0, 1, SamplingParams())).top_n_sigma == 0


def test_a_logit_divided_by_the_least_repetition_penalty_is_finite() -> None:
    setup = RowSetup.of(0, 1, SamplingParams(repetition_penalty=5e-324))
    assert np.isfinite(np.float32(1e4) / np.float32(numbers_of(setup).repetition))


@for_each("value", [math.nan, math.inf, -math.inf, 1e300, -1e300, -0.0])
def test_numbers_that_the_wire_lets_through_are_packed_all_the_same(value: float) -> None:
    """The scheduler trusts the tokenizer with them, and must not die of them."""
    names = [p.name for p in PARAMETERS if isinstance(p.kind, Number)]
    alone: list[dict[str, Any]] = [{name: value} for name in names]
    for fields in (*alone, dict[str, Any](dict.fromkeys(names, value))):
        setup = RowSetup.of(0, 1, SamplingParams(**fields), b"\0\0\0\0")
        assert len(setup.columns) == ROW_BYTES
