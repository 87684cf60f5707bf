"""Weights that are replaced under adapters, stages, beam searches, guesses, int8 and embeddings: what comes
after the change is what transformers, or a fresh launch, makes of the new weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from carousel import Client, Completion, LoraConfig, LoRARequest, SamplingParams
from tests.cpu.launcher.test_weight_updates import TIMEOUT_S, num_shared, write_checkpoint
from tests.harness.models.adapted import ADAPTERS, merged, save_adapter
from tests.harness.ring.beam_draws import assert_same, found_of, plain_draw, searched
from tests.harness.ring.launched import Launched, launched, wait_until

pytestmark = pytest.mark.full
NUM_TOKENS = 160
NUM_BEFORE = 8
"""Tokens that each stream has before the weights change."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [[300 + number, *range(100, 140)] for number in range(4)]
ADAPTED = ("sql", "later", "inline", "")
"""Adapters: of the launch, loaded while it runs, with the request, none."""


class Models(NamedTuple):
    """The weights "old" and "new" in a --weights-dir, with adapters beside it."""

    folder: Path

    def base(self, weights: str) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.folder / "weights" / weights, dtype=torch.float32
        )
        return model

    def arguments(self, *more: str, weights: str = "old") -> tuple[str, ...]:
        folder = self.folder / "weights"
        return ("--model", str(folder / weights), "--weights-dir", str(folder), "--cpu-threads", "1", *more)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    models = Models(tmp_path_factory.mktemp("models"))
    (models.folder / "weights").mkdir()
    for seed, name in enumerate(("old", "new")):
        write_checkpoint(models.folder / "weights" / name, seed)
    for seed, name in enumerate(ADAPTED[:-1]):
        save_adapter(models.base("old"), ADAPTERS["rank_8"], models.folder / name, seed)
    return models


class Stream:
    """A stream that is read in a thread of a pool."""

    def __init__(self, pool: ThreadPoolExecutor, client: Client, prompt: list[int], **options: Any) -> None:
        self.ids: list[int] = []
        self.version = ""
        self._client, self._prompt, self._options = client, prompt, options
        self._read_to_end = pool.submit(self._read)

    def _read(self) -> None:
        for delta in self._client.stream(self._prompt, GREEDY, timeout=TIMEOUT_S, **self._options):
            self.ids += delta.token_ids
            self.version = delta.weight_version

    def join(self) -> Stream:
        self._read_to_end.result(TIMEOUT_S)
        return self


def check_greedy(model: PreTrainedModel, prompt: list[int], ids: Sequence[int], start: int) -> None:
    """Hold tokens from `start` on against the reference, in one forward."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist()[start:] == list(ids)[start:]


def change_under(
    client: Client,
    prompts: list[list[int]],
    options: list[dict[str, Any]],
    begin_more: Callable[[], None] = lambda: None,
) -> list[Stream]:
    """Change the weights under streams, and return these when they have ended. begin_more: asks for what
    shall be under way, too.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [
            Stream(pool, client, prompt, **each) for prompt, each in zip(prompts, options, strict=True)
        ]
        wait_until(lambda: all(len(each.ids) >= NUM_BEFORE for each in streams), 20.0, "all have begun")
        begin_more()
        client.update_weights("new", timeout=TIMEOUT_S)
        return [each.join() for each in streams]


def check_change(
    client: Client,
    prompts: list[list[int]],
    options: list[dict[str, Any]],
    new: list[PreTrainedModel],
    begin_more: Callable[[], None] = lambda: None,
) -> None:
    """Change the weights under streams, each of which goes on as its model with the new weights does."""
    old = [
        client.generate(prompt, GREEDY, timeout=TIMEOUT_S, **each).token_ids
        for prompt, each in zip(prompts, options, strict=True)
    ]
    changed = []
    for prompt, model, ids, stream in zip(
        prompts, new, old, change_under(client, prompts, options, begin_more), strict=True
    ):
        assert (stream.version, len(stream.ids)) == ("new", NUM_TOKENS)
        changed.append(num_shared(stream.ids, list(ids)))
        check_greedy(model, prompt, stream.ids, changed[-1])
    assert max(changed) < NUM_TOKENS, "the streams ended before the weights changed"


@pytest.fixture(scope="module")
def adapted(models: Models) -> Iterator[Launched]:
    """A launch with everything that a CPU's launch may have at once."""
    arguments = models.arguments(
        *("--dtype", "float32", "--max-beam-width", "4", "--speculative-algorithm", "NGRAM"),
        *("--lora-modules", f"sql={models.folder / 'sql'}", "--allow-lora-updates"),
        *("--lora-dir", str(models.folder)),
    )
    with launched(*arguments) as launch:
        yield launch


def test_streams_with_adapters_and_searches_go_on_with_the_new_weights(
    models: Models, adapted: Launched
) -> None:
    """Guesses are made all along."""
    load = {"lora_name": "later", "lora_path": "later"}
    httpx.post(f"{adapted.url}/v1/load_lora_adapter", json=load, timeout=TIMEOUT_S).raise_for_status()
    own = models.folder / "inline"
    said = json.loads((own / "adapter_config.json").read_text())
    inline = LoraConfig(5, load_file(own / "adapter_model.safetensors"), said)
    options: list[dict[str, Any]] = [
        {"lora_request": LoRARequest("sql", 1)},
        {"lora_request": LoRARequest("later", 2)},
        {"lora_config": inline},
        {},
    ]
    base = models.base("new")
    new = [merged(base, models.folder / name) if name else base for name in ADAPTED]
    draw = plain_draw(PROMPTS[0], 96)
    searches: list[Future[Completion]] = []

    def search(options: dict[str, Any]) -> Completion:
        found: Completion = client.generate(PROMPTS[0], draw.sampling, timeout=TIMEOUT_S, **options)
        return found

    def begin_searches() -> None:
        searches.extend(pool.submit(search, each) for each in (options[0], options[3]))
        wait_until(lambda: client.server_info()["num_running"] == 6, 5.0, "the searches have begun")

    with Client(adapted.run_dir) as client, ThreadPoolExecutor(2) as pool:
        check_change(client, PROMPTS, options, new, begin_searches)
        for found, model in zip(searches, (new[0], new[3]), strict=True):
            outputs = found.result(TIMEOUT_S).outputs
            assert_same(
                found_of(outputs), searched(model, draw, [model.generation_config.eos_token_id]), draw
            )
            assert outputs[0].weight_version == "new"
        drafts = client.generate(PROMPTS[3], GREEDY, timeout=TIMEOUT_S).usage.drafts
        assert drafts is not None
        assert drafts.num_accepted > 0


@pytest.mark.parametrize("stages", [("--pp-size", "3"), ("--pp-size", "2", "--tp-size", "2")])
def test_stages_and_ranks_go_on_with_the_new_weights(models: Models, stages: tuple[str, ...]) -> None:
    more = ("--dtype", "float32", *stages)
    with launched(*models.arguments(*more)) as launch, Client(launch.run_dir) as client:
        check_change(client, PROMPTS, [{}] * len(PROMPTS), [models.base("new")] * len(PROMPTS))


def test_int8_weights_are_made_of_the_new_ones(models: Models) -> None:
    more = ("--dtype", "float32", "--quantization", "int8")
    with launched(*models.arguments(*more)) as launch, Client(launch.run_dir) as client:
        old = [list(client.generate(each, GREEDY, timeout=TIMEOUT_S).token_ids) for each in PROMPTS]
        streams = change_under(client, PROMPTS, [{}] * len(PROMPTS))
        after = [list(client.generate(each, GREEDY, timeout=TIMEOUT_S).token_ids) for each in PROMPTS]
    starts = [num_shared(each.ids, ids) for each, ids in zip(streams, old, strict=True)]
    with launched(*models.arguments(*more, weights="new")) as launch, Client(launch.run_dir) as client:
        for prompt, stream, ids, start in zip(PROMPTS, streams, after, starts, strict=True):
            assert stream.version == "new"
            rest = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS - start, ignore_eos=True)
            wanted = client.generate(prompt + stream.ids[:start], rest, timeout=TIMEOUT_S)
            assert stream.ids[start:] == list(wanted.token_ids)
            assert ids == list(client.generate(prompt, GREEDY, timeout=TIMEOUT_S).token_ids)
    assert min(starts) < NUM_TOKENS


def test_vectors_are_of_the_old_weights_or_of_the_new_ones(models: Models) -> None:
    """Those that were asked for before the change are answered after it, each of one model alone."""

    def vector(weights: str, ids: list[int]) -> Any:
        with torch.inference_mode():
            states = models.base(weights).model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        return states / np.linalg.norm(states)

    prompts = [[*range(5 + number, 405 + number)] for number in range(32)]
    more = ("--dtype", "float32", "--task", "embed", "--chunked-prefill-size", "64")
    with (
        launched(*models.arguments(*more)) as launch,
        Client(launch.run_dir) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(client.embed, prompts, timeout=TIMEOUT_S)
        client.update_weights("new", timeout=TIMEOUT_S)
        found = [each.vector for each in asked.result(TIMEOUT_S)]
        again = client.embed(prompts[0], timeout=TIMEOUT_S).vector
    np.testing.assert_allclose(again, vector("new", prompts[0]), atol=1e-4)
    for number in (0, 15, 31):
        both = [np.abs(found[number] - vector(weights, prompts[number])).max() for weights in ("old", "new")]
        assert min(both) < 1e-4, both
