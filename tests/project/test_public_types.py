"""Types of what callers write: mypy reads this file, and each is taken."""

from __future__ import annotations

import ast
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from carousel import (
    LLM,
    AsyncClient,
    Client,
    Completion,
    GenerationExecutor,
    GenerationRequest,
    GenerationResult,
    KvCacheRetentionConfig,
    SamplingParams,
    TokenRangeRetentionConfig,
)
from carousel.client.core.embedding import Embedding
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.sampling_forms import normalize
from carousel.client.core.request.submission import Submission
from runtime.wire import sampling_params
from runtime.wire.handle import make_handle


def test_lists_tuples_and_mappings_are_the_same_to_the_wire() -> None:
    lists = SamplingParams(
        seed=1,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        logit_bias={5: 1.0, 6: -2},
        stop_words_ids=[[1, 2], [3]],
        bad_words=["c"],
        bad_words_ids=[[4], (5, 6)],
        allowed_token_ids=[7, 8],
        top_p_reset_ids=[9],
    )
    tuples = SamplingParams(
        seed=1,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        logit_bias=((5, 1.0), (6, -2)),
        stop_words_ids=((1, 2), (3,)),
        bad_words=("c",),
        bad_words_ids=((4,), (5, 6)),
        allowed_token_ids=(7, 8),
        top_p_reset_ids=(9,),
    )
    assert normalize(lists) == tuples
    assert normalize(tuples) == tuples


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (SamplingParams(stop="a", bad_words="b"), SamplingParams(stop=("a",), bad_words=("b",))),
        (SamplingParams(stop=None, bad_words=None), SamplingParams()),
        (SamplingParams(stop_token_ids=range(3)), SamplingParams(stop_token_ids=(0, 1, 2))),
        (SamplingParams(allowed_token_ids=None, top_p_reset_ids=None), SamplingParams()),
        (SamplingParams(stop_words_ids=None, bad_words_ids=None), SamplingParams()),
        (SamplingParams(logit_bias={"5": 1}), SamplingParams(logit_bias=((5, 1),))),
        (SamplingParams(logit_bias=[[5, 1.5]]), SamplingParams(logit_bias=((5, 1.5),))),
        (SamplingParams(logit_bias=[(5, 1)]), SamplingParams(logit_bias=((5, 1),))),
        (SamplingParams(logit_bias=None), SamplingParams()),
    ],
)
def test_other_forms_are_taken(given: SamplingParams, taken: SamplingParams) -> None:
    got = msgspec.structs.replace(normalize(given), seed=None)
    assert msgspec.msgpack.encode(got) == msgspec.msgpack.encode(taken)


def test_the_constructor_that_type_checkers_see_is_the_structs() -> None:
    (stated,) = (
        node
        for node in ast.walk(ast.parse(Path(sampling_params.__file__).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    names = [argument.arg for argument in stated.args.args[1:]]
    defaults = map(ast.literal_eval, stated.args.defaults)
    fields = msgspec.structs.fields(SamplingParams)
    assert dict(zip(names, defaults, strict=True)) == {field.name: field.default for field in fields}
    assert names == [field.name for field in fields]


# -- prompts and options: for mypy, and for the one function that all calls end in --------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda: build_request(make_handle(1, 1), Submission("text")),
        lambda: build_request(make_handle(1, 1), Submission([1, 2], SamplingParams(stop=["a"]))),
        lambda: build_request(
            make_handle(1, 1), Submission((1, 2), stream=True, options={"priority": 3, "label": "mine"})
        ),
        lambda: build_request(make_handle(1, 1), Submission(np.array([1, 2]), options={"time_limit": 3})),
        lambda: build_request(
            make_handle(1, 1),
            Submission(
                [{"role": "user", "content": "x"}],
                options={"chat_template_kwargs": {"enable_thinking": False}},
            ),
        ),
        lambda: build_request(
            make_handle(1, 1),
            Submission(
                [1],
                options={
                    "kv_cache_retention_config": KvCacheRetentionConfig(
                        [TokenRangeRetentionConfig(0, 64, 90, timedelta(seconds=3))], decode_duration_ms=5
                    )
                },
            ),
        ),
        lambda: GenerationRequest([1, 2], SamplingParams(bad_words=["x"]), query_token_ids=[3], priority=0.5),
        lambda: GenerationRequest(np.array([1, 2]), max_tokens=5, streaming=True, allotted_time_ms=7),
    ],
)
def test_prompts_and_options_are_taken(ask: Callable[[], object]) -> None:
    assert ask() is not None


def sync_calls(client: Client | LLM) -> list[Completion]:
    """Never run: mypy holds it against the signatures. So with the next two."""
    one: Completion = client.generate("text", SamplingParams(stop=["a"]))
    other: Completion = client.generate([{"role": "user", "content": "x"}], timeout=3, priority=1)
    several: list[Completion] = client.generate(["a", "b"], [SamplingParams(n=2), SamplingParams()])
    of_ids: list[Completion] = client.generate([[1, 2], [3]], SamplingParams(logit_bias={5: -1}))
    streamed = [delta.text for delta in client.stream([1, 2], SamplingParams(stop_token_ids=[3]))]
    assert streamed
    vectors: list[Embedding] = client.embed(["a", [1, 2]], priority=1)
    assert vectors
    return [one, other, *several, *of_ids]


async def async_calls(client: AsyncClient) -> Completion:
    async for delta in client.stream("text", SamplingParams(stop=["a"])):
        print(delta.text)
    return await client.generate([1, 2], SamplingParams(allowed_token_ids=[1, 2]), label="mine")


def executor_calls(executor: GenerationExecutor) -> list[GenerationResult]:
    one: GenerationResult = executor.generate_async([1, 2], SamplingParams(stop="a"), streaming=True)
    several: Any = executor.generate([[1, 2], [3]], [SamplingParams(), SamplingParams(bad_words_ids=[[1]])])
    return [one, executor.submit(GenerationRequest([1])), *several]
