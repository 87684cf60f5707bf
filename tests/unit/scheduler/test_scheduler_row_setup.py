"""RowSetup: what the device is told of a request when it gets a row, new or again."""

from __future__ import annotations

from typing import Any

from runtime.sampling.features import LOGITS
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import RowSetup
from runtime.wire.sampling_params import SamplingParams
from tests.harness.cases import for_each
from tests.harness.row_setups import numbers_of
from tests.harness.scheduler.scheduler_parts import manager, request

PROMPT = [1, 2, 3]


def setup_of(output: list[int], **sampling: Any) -> RowSetup:
    """Return the setup of a request that has `output` already: resumed, or retracted."""
    req = request(manager(), 1, PROMPT)
    req.sampling = SamplingParams(seed=1, **sampling)
    req.parked = pack_ids(PROMPT + output)
    return req.row_setup(0)


def test_a_plain_request_tells_the_device_nothing_of_its_history() -> None:
    assert setup_of([7]) == RowSetup.of(0, 3, SamplingParams(seed=1))


@for_each(
    "sampling",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": ((5,), (6, 7))},
    ],
)
def test_what_looks_back_gets_prompt_and_output(sampling: dict[str, Any]) -> None:
    assert unpack_ids(setup_of([8, 9], **sampling).history_ids).tolist() == [*PROMPT, 8, 9]


def test_bad_words_of_one_token_need_no_history() -> None:
    setup = setup_of([8], bad_words_ids=((5,), (6,)))
    assert [unpack_ids(word).tolist() for word in setup.bad_words] == [[5], [6]]
    assert setup.history_ids == b""


def test_every_field_of_the_sampling_reaches_the_device() -> None:
    setup = setup_of(
        [],
        allowed_token_ids=(4, 5),
        bad_words_ids=((5, 6),),
        no_repeat_ngram_size=3,
        top_p_decay=0.5,
        top_p_min=0.25,
        top_p_reset_ids=(7, 8),
        return_generation_logits=True,
    )
    assert unpack_ids(setup.allowed_ids).tolist() == [4, 5]
    assert [unpack_ids(word).tolist() for word in setup.bad_words] == [[5, 6]]
    numbers = numbers_of(setup)
    assert (numbers.ngram, numbers.top_p_decay, numbers.top_p_min) == (3, 0.5, 0.25)
    assert unpack_ids(setup.top_p_reset_ids).tolist() == [7, 8]
    assert setup.features & LOGITS


@for_each(
    ("output", "age"),
    [([], 0), ([9, 9, 9], 3), ([9, 7], 0), ([7, 9, 9], 2), ([7, 8, 9, 7, 9], 1), ([8], 0)],
)
def test_top_p_has_decayed_by_the_output_since_the_last_reset(output: list[int], age: int) -> None:
    assert numbers_of(setup_of(output, top_p_decay=0.9, top_p_reset_ids=(7, 8))).top_p_age == age


def test_a_reset_id_in_the_prompt_resets_nothing() -> None:
    assert numbers_of(setup_of([9, 9], top_p_decay=0.9, top_p_reset_ids=(PROMPT[-1],))).top_p_age == 2
    assert numbers_of(setup_of([9, 9], top_p_decay=0.9)).top_p_age == 2
