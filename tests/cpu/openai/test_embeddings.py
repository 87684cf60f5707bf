"""Embedding servers: the vectors of transformers, whatever the chunks and the cache; and OpenAI's API."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel, LlamaForCausalLM, MistralConfig, Qwen3Config

from carousel import LLM, AsyncClient, Client, InvalidRequest, StartError
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import FloatArray
from tests.harness.ring.launched import Launched, launched, wait_until

SETTINGS = ("--dtype", "float32", "--cpu-threads", "1", "--served-model-name", "demo")
WAIT_S = 60.0


def prompts() -> list[list[int]]:
    """Return prompts of 1 to 150 tokens; the last ones begin alike, the very last is one of them again."""
    generator = np.random.default_rng(5)
    drawn = [generator.integers(5, 4000, size).tolist() for size in (1, 2, 7, 16, 33, 150)]
    start = generator.integers(5, 4000, 64).tolist()
    alike = [start + generator.integers(5, 4000, size).tolist() for size in (3, 20)]
    return [*drawn, *alike, alike[0]]


def hidden_states(ids: list[int]) -> FloatArray:
    """[tokens, hidden_size], after the final norm."""
    model = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).model
    with torch.inference_mode():
        states: FloatArray = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return states


def of_length_one(vector: FloatArray) -> FloatArray:
    unit: FloatArray = vector / np.linalg.norm(vector)
    return unit


@pytest.fixture(scope="module")
def references() -> list[FloatArray]:
    return [hidden_states(ids) for ids in prompts()]


@pytest.mark.parametrize(
    ("pooling", "settings"),
    [
        ("last", {}),
        ("mean", {"tp_size": 2}),
        ("last", {"model_impl": "transformers"}),
        pytest.param("mean", {}, marks=pytest.mark.full),
    ],
    ids=["last", "mean-two-ranks", "last-transformers", "mean"],
)
def test_vectors_are_those_of_transformers(
    pooling: str, settings: dict[str, Any], references: list[FloatArray]
) -> None:
    """All at once and then one by one: batched, in chunks of 16, from a pool that holds two of them, found in
    the cache (last) or not (mean). No text: that is a quarter of what a launch takes.
    """
    small: dict[str, Any] = {"chunked_prefill_size": 16, "max_total_tokens": 320, "max_running_requests": 4}
    small["skip_tokenizer_init"] = True
    with LLM(task="embed", pooling=pooling, dtype="float32", cpu_threads=1, **small, **settings) as llm:
        together = llm.embed(prompts(), timeout=WAIT_S)
        alone = [llm.embed(ids, timeout=WAIT_S) for ids in prompts()]
        info = llm.server_info()
    for got in (together, alone):
        for embedding, states, ids in zip(got, references, prompts(), strict=True):
            expected = of_length_one(states[-1] if pooling == "last" else states.mean(0))
            np.testing.assert_allclose(embedding.vector, expected, atol=1e-4)
            assert (embedding.usage.prompt_tokens, embedding.usage.completion_tokens) == (len(ids), 0)
    cached = alone[-1].usage.cached_tokens
    assert cached >= 48 if pooling == "last" else cached == 0
    assert info["num_running"] == info["num_waiting"] == 0


def save_with_modules(path: Path, kind: str, *, normalize: bool) -> None:
    """The demo model with the files of sentence-transformers."""
    for file in DEMO_MODEL.iterdir():
        (path / file.name).symlink_to(file)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    entries = [
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{name}" if n else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for n, name in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({kind: True, "word_embedding_dimension": 256}))


def test_pooling_is_what_the_checkpoint_says(tmp_path: Path, references: list[FloatArray]) -> None:
    save_with_modules(tmp_path, "pooling_mode_mean_tokens", normalize=False)
    with LLM(tmp_path, task="embed", dtype="float32", cpu_threads=1) as llm:
        vector = llm.embed(prompts()[4], timeout=WAIT_S).vector
        scores = llm.score(prompts()[4], prompts()[3:5], timeout=WAIT_S)
        pair = llm.score([prompts()[3]], [prompts()[4]], timeout=WAIT_S)
        with pytest.raises(InvalidRequest, match=r"^data_1: .* data_2, which has 3; got 2$"):
            llm.score(["a", "b"], ["a", "b", "c"])
    means = [of_length_one(states.mean(0)) for states in references[3:5]]
    assert [each.outputs.score for each in scores] == pytest.approx(
        [float(means[0] @ means[1]), 1.0], abs=1e-4
    )
    assert pair[0].score == pytest.approx(scores[0].score, abs=1e-5)
    assert [each.usage.prompt_tokens for each in scores] == [len(ids) for ids in prompts()[3:5]]
    np.testing.assert_allclose(vector, references[4].mean(0), atol=1e-4)


@pytest.mark.parametrize("family", [Qwen3Config, pytest.param(MistralConfig, marks=pytest.mark.full)])
def test_a_decoder_without_a_head_embeds_and_does_nothing_else(tmp_path: Path, family: Any) -> None:
    torch.manual_seed(3)
    config = family(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = AutoModel.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(StartError, match="--task embed"):
        LLM(tmp_path, skip_tokenizer_init=True)
    ids = prompts()[5]
    with LLM(tmp_path, task="embed", pooling="mean", skip_tokenizer_init=True, cpu_threads=1) as llm:
        vector = llm.embed(ids, timeout=WAIT_S).vector
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    np.testing.assert_allclose(vector, of_length_one(expected), atol=1e-4)


# -- over HTTP -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    with launched(*SETTINGS, "--task", "embed") as launch:
        yield launch


@pytest.fixture(scope="module")
def client(launch: Launched) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{launch.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_openai_gets_the_vectors_in_order(client: openai.OpenAI, references: list[FloatArray]) -> None:
    answer = client.embeddings.create(model="demo", input=prompts())
    assert [item.index for item in answer.data] == list(range(len(prompts())))
    for item, states in zip(answer.data, references, strict=True):
        np.testing.assert_allclose(item.embedding, of_length_one(states[-1]), atol=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts()))


def test_512_texts_of_one_request(client: openai.OpenAI) -> None:
    texts = [f"def f{number}(): return {number % 7}" for number in range(512)]
    vectors = [item.embedding for item in client.embeddings.create(model="demo", input=texts).data]
    for number in (0, 255, 511):
        alone = client.embeddings.create(model="demo", input=texts[number]).data[0].embedding
        np.testing.assert_allclose(vectors[number], alone, atol=1e-5)


def test_floats_base64_and_dimensions(launch: Launched) -> None:
    def ask(**body: object) -> object:
        response = httpx.post(f"{launch.url}/v1/embeddings", json={"input": "x = 1", **body}, timeout=WAIT_S)
        assert response.status_code == 200, response.text
        return response.json()["data"][0]["embedding"]

    numbers, packed = ask(), ask(encoding_format="base64")
    assert isinstance(packed, str)
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(packed), "<f4"), np.array(numbers, np.float32)
    )
    short = np.array(ask(dimensions=16, user="someone"), np.float32)
    np.testing.assert_allclose(short, of_length_one(np.array(numbers, np.float32)[:16]), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "length"),
        ({"input": ""}, "input", "empty"),
        ({"input": [[]]}, "input[0]", ""),
        ({"input": ["x", 1]}, "input", "all text"),
        ({"input": ["x"] * 2049}, "input", "2048"),
        ({"input": "x", "dimensions": 257}, "dimensions", "256"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": [4096]}, "input", "4095"),
        ({"input": "x", "dimension": 3}, "dimension", "did you mean dimensions?"),
        ({}, "input", "missing"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(launch: Launched, body: object, param: str, words: str) -> None:
    response = httpx.post(f"{launch.url}/v1/embeddings", json=body, timeout=WAIT_S)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_long_text_is_cut_where_the_request_says_so(launch: Launched) -> None:
    ids = [5 + number % 1000 for number in range(9000)]

    def ask(**body: object) -> Any:
        return httpx.post(f"{launch.url}/v1/embeddings", json=body, timeout=WAIT_S).json()

    cut, kept = ask(input=[ids], truncate_prompt_tokens=7), ask(input=ids[-7:])
    assert cut["usage"]["prompt_tokens"] == kept["usage"]["prompt_tokens"] == 7
    np.testing.assert_allclose(cut["data"][0]["embedding"], kept["data"][0]["embedding"], atol=1e-5)
    text = "x = 1\n" * 20
    with Client(launch.run_dir) as client:
        assert client.embed(text, truncate_prompt_tokens=7).usage.prompt_tokens == 7
        most = client.server_info()["max_len"] - 1
        assert client.embed(ids, truncate_prompt_tokens=-1).usage.prompt_tokens == most
    assert ask(input=text, truncate_prompt_tokens=1 << 20)["error"]["param"] == "truncate_prompt_tokens"


def test_an_embedding_server_generates_nothing(launch: Launched, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--task embed"):
        client.completions.create(model="demo", prompt="x")
    with Client(launch.run_dir) as sdk, pytest.raises(InvalidRequest, match="--task embed"):
        sdk.generate("x", timeout=WAIT_S)


def test_a_generating_server_embeds_nothing() -> None:
    with launched(module="tests.harness.ring.sleeping_worker") as launch:
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/score", {"text_1": "x", "text_2": "y"}),
            ("/rerank", {"query": "x", "documents": ["y"]}),
        ):
            response = httpx.post(f"{launch.url}{path}", json=body, timeout=WAIT_S)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "task_not_served"


async def _embed(run_dir: Path, texts: list[str]) -> list[FloatArray]:
    async with AsyncClient(run_dir) as sdk:
        return [(await sdk.embed(text, timeout=WAIT_S)).vector for text in texts]


async def _embed_and_cancel(run_dir: Path) -> None:
    async with AsyncClient(run_dir) as sdk:
        tasks = [asyncio.create_task(sdk.embed([7] * 2000)) for _ in range(32)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_the_async_client_embeds_and_cancels(launch: Launched) -> None:
    first, again = asyncio.run(_embed(launch.run_dir, ["x = 1", "x = 1"]))
    np.testing.assert_allclose(first, again, atol=1e-5)
    asyncio.run(_embed_and_cancel(launch.run_dir))
    with Client(launch.run_dir) as sdk:

        def all_is_free() -> bool:
            info = sdk.server_info()
            return not info["num_running"] and not info["num_waiting"]

        wait_until(all_is_free, WAIT_S, "rows free after the cancelled requests")


# -- texts compared ------------------------------------------------------------------------------------------

TEXTS = ["def add(a, b):\n", "import os\n", "class Stack:\n", "def sub(a, b):\n"]


def asked(launch: Launched, path: str, **body: object) -> Any:
    response = httpx.post(f"{launch.url}{path}", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text
    return response.json()


def cosines(launch: Launched, first: list[str], second: list[str]) -> list[float]:
    data = asked(launch, "/v1/embeddings", input=[*first, *second])["data"]
    vectors = np.array([item["embedding"] for item in data])
    return [float(a @ b) for a, b in zip(vectors[: len(first)], vectors[len(first) :], strict=True)]


@pytest.mark.parametrize(
    ("first", "second"),
    [(TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS[1:]), ([TEXTS[0]], TEXTS), (TEXTS[:2], TEXTS[2:])],
    ids=["one with one", "one with several", "a list of one", "pairs"],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_the_cosines_of_vectors(launch: Launched, path: str, first: Any, second: Any) -> None:
    answer = asked(launch, path, model="demo", text_1=first, text_2=second)
    left, right = ([each] if isinstance(each, str) else each for each in (first, second))
    expected = cosines(launch, left * (len(right) // len(left)), right)
    assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-5)
    assert [item["index"] for item in answer["data"]] == list(range(len(right)))
    assert answer["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_texts_are_ranked_by_their_nearness_to_the_query(launch: Launched, path: str) -> None:
    documents = [*TEXTS, TEXTS[1]]
    scores = cosines(launch, [TEXTS[0]] * 5, documents)
    results = asked(launch, path, query=TEXTS[0], documents=documents)["results"]
    assert [item["document"]["text"] for item in results] == [documents[item["index"]] for item in results]
    ranked = [item["relevance_score"] for item in results]
    assert ranked == sorted(ranked, reverse=True)
    assert ranked == pytest.approx([scores[item["index"]] for item in results], abs=1e-5)
    assert sorted(item["index"] for item in results) == list(range(5))
    assert (results[0]["index"], results[0]["relevance_score"]) == (0, pytest.approx(1.0, abs=1e-5))
    two = asked(launch, path, query=TEXTS[0], documents=documents, top_n=2, return_documents=False)["results"]
    assert [item["index"] for item in two] == [item["index"] for item in results[:2]]
    assert all(set(item) == {"index", "relevance_score"} for item in two)


def test_many_long_texts_are_compared(launch: Launched) -> None:
    texts = [f"{number} " + "x = 1\n" * 400 for number in range(80)]
    results = asked(launch, "/rerank", query=texts[3], documents=texts, truncate_prompt_tokens=8, top_n=0)
    assert len(results["results"]) == 80
    pairs = asked(launch, "/score", text_1=texts, text_2=texts, truncate_prompt_tokens=8)
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1.0] * 80, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "as many as text_2"),
        ("/score", {"text_1": "a"}, "text_2", "missing"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1", "length"),
        ("/score", {"text_1": ["a"] * 1500, "text_2": ["a"] * 1500}, "text_2", "2048 texts in all"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1, text_2", "empty"),
        ("/rerank", {"documents": ["a"]}, "query", "missing"),
        ("/rerank", {"query": "a", "documents": ["a"] * 2048}, "documents", "2048 texts in all"),
        ("/rerank", {"query": "a", "documents": [{"text": "a"}]}, "documents[0]", "Expected `str`"),
        ("/rerank", {"query": "a", "documents": ["x = 1\n" * 9000]}, "query, documents", ""),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", ""),
    ],
)
def test_what_cannot_be_compared_is_a_400_that_names_it(
    launch: Launched, path: str, body: object, param: str, words: str
) -> None:
    response = httpx.post(f"{launch.url}{path}", json=body, timeout=WAIT_S)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
