"""Random beam searches, the results of transformers' `generate` for them, and their comparison."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from carousel import CompletionOutput
from runtime.wire.handle import next_sibling
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.serving_ring import Generated

WIDTHS = (2, 3, 4, 8)
PENALTIES = (-1.0, 0.0, 0.7, 1.0, 2.0)
STOPPING = {0: False, 1: True, 2: "never"}
SCORE_TOLERANCE = 1e-5
"""Largest difference of two scores that counts as none, as a share of the score where that is above 1."""


class Draw(NamedTuple):
    prompt: list[int]
    width: int
    penalty: float
    stopping: int
    num_tokens: int
    more_stop_ids: tuple[int, ...]
    n: int
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition: float = 1.0
    ngram: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.num_tokens,
            temperature=0.0,
            seed=0,
            n=self.n,
            use_beam_search=True,
            beam_width=self.width,
            length_penalty=self.penalty,
            early_stopping=self.stopping,
            stop_token_ids=self.more_stop_ids,
            min_tokens=self.min_tokens,
            bad_words_ids=self.bad_words,
            repetition_penalty=self.repetition,
            no_repeat_ngram_size=self.ngram,
            logit_bias=self.bias,
            allowed_token_ids=self.allowed,
            stop=self.stop,
        )


class Found(NamedTuple):
    tokens: list[int]
    score: float
    is_stopped: bool | None = None
    """True if its last token ends it; None: nobody knows."""


def draws(seed: int, count: int, vocab_size: int, max_tokens: int) -> list[Draw]:
    """Searches of all widths, penalties and rules of stopping, with one stop id and with three."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        width = rng.choice(WIDTHS)
        made.append(
            Draw(
                [rng.randrange(1, vocab_size) for _ in range(rng.randrange(1, 40))],
                width,
                rng.choice(PENALTIES),
                rng.choice(list(STOPPING)),
                rng.choice([1, 2, max_tokens // 2, max_tokens]),
                rng.choice([(), tuple(rng.sample(range(1, vocab_size), 2))]),
                rng.randrange(1, width + 1),
            )
        )
    return made


def plain_draw(prompt: list[int], num_tokens: int) -> Draw:
    """Return a search of width 4 for two hypotheses, with everything else as it is by default."""
    return Draw(prompt, 4, 1.0, 0, num_tokens, (), 2)


def found_of(outputs: Sequence[CompletionOutput]) -> list[Found]:
    """Return the hypotheses of a client's completion."""
    return [
        Found(list(output.token_ids), output.score or 0.0, output.finish_reason == "stop")
        for output in outputs
    ]


def searched(
    model: PreTrainedModel,
    draw: Draw,
    eos_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    allowed_after: Callable[[list[int]], list[int]] | None = None,
    processors: LogitsProcessorList | None = None,
) -> list[Found]:
    """Return what `generate` finds, best first. `tokenizer`: for stop strings. `allowed_after`: gives some
    id at least that may follow an output; None: those of `draw.allowed` may. `processors`: come behind those
    that the draw asks for.
    """
    stop_ids = [*eos_ids, *draw.more_stop_ids]

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        output = ids[len(draw.prompt) :].tolist()
        return list(draw.allowed) if allowed_after is None else allowed_after(output)

    with torch.inference_mode():
        out = model.generate(
            torch.tensor([draw.prompt]),
            attention_mask=torch.ones(1, len(draw.prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=draw.width,
            num_return_sequences=draw.n,
            length_penalty=draw.penalty,
            early_stopping=STOPPING[draw.stopping],
            max_new_tokens=draw.num_tokens,
            eos_token_id=stop_ids,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            min_new_tokens=draw.min_tokens or None,
            bad_words_ids=[list(word) for word in draw.bad_words] or None,
            repetition_penalty=draw.repetition,
            no_repeat_ngram_size=draw.ngram or None,
            sequence_bias={(token,): bias for token, bias in draw.bias} or None,
            prefix_allowed_tokens_fn=allowed if draw.allowed or allowed_after is not None else None,
            stop_strings=list(draw.stop) or None,
            tokenizer=tokenizer,
            logits_processor=processors,
        )
    found = []
    for ids, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        new = ids[len(draw.prompt) :]
        ends = [
            at
            for at, token in enumerate(new)
            if token in stop_ids or _is_stopped(tokenizer, new[: at + 1], draw)
        ]
        found.append(Found(new[: ends[0] + 1] if ends else new, score, bool(ends)))
    return found


def _is_stopped(tokenizer: PreTrainedTokenizerBase | None, output: list[int], draw: Draw) -> bool:
    """Return True if a stop string is in the text of these ids."""
    if tokenizer is None or not draw.stop:
        return False
    text = str(tokenizer.decode(output, skip_special_tokens=True))
    return any(stop in text for stop in draw.stop)


def found_by(generated: dict[bytes, Generated], handle: bytes, n: int) -> list[Found]:
    """Return what the ring has found, best first."""
    found = []
    for number in range(n):
        each = generated[next_sibling(handle, number)]
        assert each.closed is not None
        assert each.closed.beam is not None
        found.append(Found(each.tokens, each.closed.beam.score, each.closed.reason == "stop"))
    return found


def assert_same(got: list[Found], wanted: list[Found], draw: Draw) -> None:
    assert [each.tokens for each in got] == [each.tokens for each in wanted], draw
    for one, other in zip(got, wanted, strict=True):
        assert None in (one.is_stopped, other.is_stopped) or one.is_stopped is other.is_stopped, draw
        # With a bias terms of both signs cancel out, and what each is off by does not.
        least = float(len(other.tokens)) if draw.bias else 1.0
        assert abs(one.score - other.score) <= SCORE_TOLERANCE * max(least, abs(other.score)), draw
