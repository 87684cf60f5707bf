"""VllmCalls: calls of vLLM's LLM that need more than the ring's answer: a tokenizer in this process, vectors
that are compared, and searches by vLLM's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from carousel.client.core.embedding import similarities
from carousel.client.core.logprobs import TokenLogprob
from carousel.client.core.request.submission import EmbedOptions, RequestOptions, TokenIds, is_single_prompt
from carousel.client.core.result import Completion, FinishReason
from carousel.client.prompt_objects import without_objects
from carousel.client.sync import Client
from runtime.base.errors import ConfigError, InvalidRequest
from runtime.ring.endpoints import Endpoints
from runtime.ring.process import LaunchFile
from runtime.wire.messages import Usage
from runtime.wire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Text = str | TokenIds


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a pair of texts."""

    score: float
    """Cosine of the angle between their vectors."""
    usage: Usage
    """Tokens of the second text."""

    @property
    def outputs(self) -> Score:
        """Return the score itself, for code that expects vLLM's result."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, by vLLM's names."""

    beam_width: int
    """Number of beams, and of sequences in the result. The runtime's max_beam_width must be as large."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Temperature, which can only be 0: a search draws nothing."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Return the SamplingParams of this beam search."""
        return SamplingParams(
            use_beam_search=True,
            beam_width=self.beam_width,
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """Hypothesis of a beam search."""

    tokens: list[int]
    """Token ids of prompt and output."""
    text: str
    """Text of these tokens, without special ones."""
    cum_logprob: float | None
    """Sum of the logprobs of the output; None for a place that no hypothesis has filled."""
    logprobs: Sequence[TokenLogprob]
    """Logprobs of the output; empty: they are not asked for."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Result of a beam search."""

    sequences: list[BeamSearchSequence]
    """Hypotheses, best first."""
    completion: Completion
    """Result as `generate` gives it, with the score of each hypothesis."""


class VllmCalls(Client):
    """Client with these calls, whose runtime's files are on this machine."""

    _run_dir: Path

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the model's tokenizer as transformers has it, with the launch's chat template. It is read
        once, in this process. Raises ConfigError if the runtime has none.
        """
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        # Imported here: transformers takes half a second.
        from runtime.text.tokenizer import read_wrapper

        config = LaunchFile.read(Endpoints(self._run_dir).config_file).config
        if not config.tokenizer:
            raise ConfigError("skip_tokenizer_init: this runtime has no tokenizer; leave it out")
        template = Path(config.chat_template) if config.chat_template else None
        return read_wrapper(Path(config.tokenizer), template)

    def score(
        self,
        data_1: Text | Sequence[Text],
        data_2: Text | Sequence[Text],
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> list[Score]:
        """Return how near texts are to each other, by the vectors of a runtime with task="embed": those of
        data_1 and data_2 in pairs, or one in data_1 with each in data_2. Options and errors: as in `embed`.
        """
        first: list[Any] = [data_1] if is_single_prompt(data_1) else list(data_1)
        second: list[Any] = [data_2] if is_single_prompt(data_2) else list(data_2)
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"data_1: one text, or as many as data_2, which has {len(second)}; got {len(first)}",
                param="data_1",
            )
        vectors = self.embed(
            [*first, *second], truncate_prompt_tokens=truncate_prompt_tokens, timeout=timeout, **options
        )
        compared = vectors[len(first) :]
        scores = similarities(vectors[: len(first)], compared)
        return [Score(score, each.usage) for score, each in zip(scores, compared, strict=True)]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[BeamSearchOutput]:
        """Search for the most likely outputs of one prompt or several, each a text, token ids or one of
        vLLM's objects. The search is that of `generate` with use_beam_search: order, scores and end are those
        of transformers, and a length is that of the output. Options and errors: as in `generate`.
        """
        given = without_objects(prompts)
        several: list[Any] = [given] if is_single_prompt(given) else list(given)
        tokenizer = self._tokenizer
        ids = [tokenizer(each)["input_ids"] if isinstance(each, str) else list(each) for each in several]
        done = self.generate(ids, params.sampling_params(), timeout=timeout, **options)
        return [
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        tokens := [*prompt, *output.token_ids],
                        tokenizer.decode(tokens, skip_special_tokens=True),
                        output.cumulative_logprob,
                        output.logprobs,
                        output.finish_reason,
                        output.stop_reason,
                    )
                    for output in completion.outputs
                ],
                completion,
            )
            for prompt, completion in zip(ids, done, strict=True)
        ]
