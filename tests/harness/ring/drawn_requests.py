"""Requests with guesses, and the same ones without, sent to a launch in random batches: random combinations
of parameters, and every parameter with every kind of guess.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any

from carousel import AsyncClient, Completion, SamplingParams

NUM_AT_ONCE = 24
TIMEOUT_S = 300.0
CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"
PROMPTS = [
    CODE + CODE + "def add(a, b):\n",
    "for i in range(10):\n    print(i)\n" * 3,
    "import numpy as np\n",
    "x = 1\n" * 12,
]
NEW = [
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n",
    "a",
]
METHODS = ("ngram", "ngram", "drafts", "drafts with mistakes", "wrong drafts", "prediction")
PIECES = ["\n", "return", " self", "    ", "(", "print(", "def", "a", ":\n", " = "]
IDS = range(8, 400)
NUM_OF_EACH_AT_ONCE = 48
NUM_TOKENS = 24
WAYS = ("ngram", "drafts", "prediction")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k": {"top_k": 20, "temperature": 0.7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {
        "temperature": 0.5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
    "n-gram ban": {"temperature": 0.0, "no_repeat_ngram_size": 6},
    "logit bias": {"temperature": 0.3, "logit_bias": {10: 2.0, 100: -3.0}},
    "min tokens": {"temperature": 0.0, "min_tokens": 16, "ignore_eos": False},
    "stop strings": {"temperature": 0.0},
    "stop ids": {"temperature": 0.0},
    "max_tokens": {"temperature": 0.0},
}


@dataclass
class Drawn:
    """One combination."""

    number: int
    prompt: str
    fields: dict[str, Any]
    method: str

    @property
    def without(self) -> SamplingParams:
        return SamplingParams(**self.fields, speculative_num_draft_tokens=0)

    def guessing(self, rng: random.Random, off: Completion) -> tuple[SamplingParams, dict[str, Any]]:
        """Parameters and options of the same request with guesses; off: what it gave without."""
        ids, text = list(off.outputs[0].token_ids), off.outputs[0].text
        if self.method == "prediction" and text:
            at = rng.randrange(len(text))
            return SamplingParams(**self.fields), {
                "prediction": text[:at] + rng.choice(["", "?"]) + text[at:]
            }
        if not self.method.endswith(("drafts", "mistakes")) or not ids:
            number = rng.choice([None, None, 1, 2])
            return SamplingParams(**self.fields, speculative_num_draft_tokens=number), {}
        wrong = {"drafts": 0.0, "wrong drafts": 1.0}.get(self.method, 0.15)
        drafts = [rng.choice(IDS) if rng.random() < wrong else token for token in ids[:64]]
        number = rng.choice([None, 0])
        return SamplingParams(**self.fields, speculative_num_draft_tokens=number), {"draft_token_ids": drafts}


def draw(rng: random.Random, number: int) -> Drawn:
    def some(of: Iterable[Any], most: int) -> list[Any]:
        return rng.sample(list(of), rng.randint(1, most))

    optional: dict[str, Any] = {
        "top_k": rng.randint(1, 50),
        "top_p": rng.uniform(0.3, 1.0),
        "min_p": rng.uniform(0.0, 0.2),
        "top_n_sigma": rng.uniform(0.5, 3.0),
        "repetition_penalty": rng.uniform(0.8, 1.6),
        "presence_penalty": rng.uniform(-1.0, 1.5),
        "frequency_penalty": rng.uniform(-1.0, 1.5),
        "no_repeat_ngram_size": rng.randint(1, 5),
        "logit_bias": {token: rng.uniform(-4.0, 4.0) for token in some(IDS, 6)},
        "bad_words": some(PIECES, 3),
        "allowed_token_ids": some(IDS, 40),
        "stop": some(PIECES, 2),
        "stop_token_ids": some(IDS, 60),
        "logprobs": rng.randint(0, 3),
        "prompt_logprobs": rng.randint(0, 1),
        "n": 4,
    }
    fields = {name: value for name, value in optional.items() if rng.random() < 0.15}
    if rng.random() < 0.1:
        fields |= {"top_p": 0.95, "top_p_decay": rng.uniform(0.8, 1.0), "top_p_min": 0.1}
    most = rng.randint(1, 40)
    fields |= {
        "max_tokens": most,
        "min_tokens": rng.choice([0, 0, 0, rng.randint(0, most)]),
        "temperature": rng.choice([0.0, 0.0, 0.5, 1.0, 1.3]),
        "ignore_eos": rng.random() < 0.5,
        "seed": rng.randrange(1 << 30),
    }
    prompt = rng.choice([*PROMPTS, *PROMPTS, *NEW])
    if rng.random() < 0.9:  # else it has been there before, and is cached
        prompt += "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
    return Drawn(number, prompt, fields, rng.choice(METHODS))


def check_equal(found: Completion, expected: Completion, tolerance: float = 1e-5) -> None:
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert (one.finish_reason, one.matched_stop) == (other.finish_reason, other.matched_stop)
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert math.isclose(left.logprob, right.logprob, abs_tol=tolerance)
            assert [token for token, _ in left.top] == [token for token, _ in right.top]
    for mine, its in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert (mine is None) == (its is None)
        assert mine is None or its is None or math.isclose(mine.logprob, its.logprob, abs_tol=tolerance)


async def compare(client: AsyncClient, seed: int, num_requests: int, tolerance: float) -> int:
    """Send so many combinations without guesses and with them, and hold their outputs together. Returns the
    number of guesses that were right.
    """
    rng = random.Random(seed)
    places = asyncio.Semaphore(NUM_AT_ONCE)
    drawn = [draw(rng, number) for number in range(num_requests)]

    async def generate(prompt: str, sampling: SamplingParams, **options: Any) -> Completion:
        async with places:
            return await client.generate(prompt, sampling, timeout=TIMEOUT_S, **options)

    async def both(each: Drawn) -> int:
        off = await generate(each.prompt, each.without)
        sampling, options = each.guessing(random.Random(each.number), off)
        found = await generate(each.prompt, sampling, **options)
        try:
            check_equal(found, off, tolerance)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {each}, {options}") from error
        return 0 if found.usage.drafts is None else found.usage.drafts.num_accepted

    pairs: list[Awaitable[int]] = [both(each) for each in drawn]
    return sum(await asyncio.gather(*pairs))


# -- each parameter ------------------------------------------------------------------------------------------


def prompts(num_prompts: int) -> list[str]:
    """So many different ones, most of which repeat themselves."""
    rng = random.Random(5)
    return [
        "".join(rng.choices(PIECES, k=rng.randint(1, 8))) + rng.choice(PROMPTS) for _ in range(num_prompts)
    ]


def parameters(kind: str, seed: int, whole: Completion) -> dict[str, Any]:
    """Parameters of one kind. whole: the greedy output that a stop cuts, somewhere between its ends."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 1, "ignore_eos": True, "seed": seed}
    fields |= KINDS[kind]
    ids, text = whole.token_ids, whole.outputs[0].text
    at = rng.randrange(1, NUM_TOKENS)
    if kind == "stop ids":
        fields["stop_token_ids"] = [ids[at]]
    elif kind == "stop strings":
        begin = rng.randrange(max(1, len(text) - 3))
        fields["stop"] = [text[begin : begin + 3] or "\n"]
    elif kind == "max_tokens":
        fields["max_tokens"] = at
    return fields


async def compare_each(client: AsyncClient, num_prompts: int, tolerance: float) -> Counter[tuple[str, str]]:
    """Hold the outputs of every kind and method to that without guesses. Returns the numbers of guesses that
    were right.
    """
    places = asyncio.Semaphore(NUM_OF_EACH_AT_ONCE)
    num_right: Counter[tuple[str, str]] = Counter()

    async def generate(prompt: str, sampling: SamplingParams, **options: Any) -> Completion:
        async with places:
            return await client.generate(prompt, sampling, timeout=TIMEOUT_S, **options)

    async def check(number: int, prompt: str, kind: str, whole: Completion) -> None:
        fields = parameters(kind, number, whole)
        off = await generate(prompt, SamplingParams(**fields, speculative_num_draft_tokens=0))
        # Where the output is cut guesses go on, so that the end is inside of an accepted run.
        best = whole if kind in ("stop strings", "stop ids", "max_tokens") else off
        ways: dict[str, dict[str, Any]] = {
            "ngram": {},
            "drafts": {"draft_token_ids": best.token_ids},
            "prediction": {"prediction": best.outputs[0].text or "\n"},
        }
        for method, options in ways.items():
            found = await generate(prompt, SamplingParams(**fields), **options)
            try:
                check_equal(found, off, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{kind}, {method}, prompt {number}: {prompt!r}, {fields}") from error
            assert found.usage.drafts is not None
            num_right[kind, method] += found.usage.drafts.num_accepted

    async def check_all(number: int, prompt: str) -> None:
        greedy = SamplingParams(
            temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, speculative_num_draft_tokens=0
        )
        whole = await generate(prompt, greedy)
        await asyncio.gather(*(check(number, prompt, kind, whole) for kind in KINDS))

    await asyncio.gather(*(check_all(number, prompt) for number, prompt in enumerate(prompts(num_prompts))))
    return num_right
