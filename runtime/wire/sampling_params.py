"""SamplingParams: what a user may ask of one generation. `validate()` refuses bad values by the field's name.

Field names and neutral values are those that users of vLLM, SGLang and TensorRT-LLM type; the order in which
the sampler applies them is in docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.sampling.kinds import MAX_STOP_CHARS, MAX_TOKEN_ID, MAX_WORD_IDS, IdKind
from runtime.sampling.table import GREEDY_BELOW, MAX_TOKENS_LIMIT, PARAMETERS, SEEDS

TokenId = Annotated[int, Meta(ge=0, lt=MAX_TOKEN_ID + 1)]
WordIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_WORD_IDS)]
StopText = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]


WITH_TOKEN_IDS = tuple((p.name, p.kind.token_ids) for p in PARAMETERS if isinstance(p.kind, IdKind))

WITHOUT_BEAMS = (
    *(("length_penalty", (None, 1.0)), ("early_stopping", (None, 0, 1))),
    *(("beam_search_diversity_rate", (0.0,)), ("beam_width_array", ((),))),
)
"""Values that callers write who do not search."""

# What callers may write; the client library makes of them what the fields say.
Texts: TypeAlias = str | Sequence[str] | None
Ids: TypeAlias = Sequence[int] | None
Words: TypeAlias = Sequence[Sequence[int]] | None
Bias: TypeAlias = Mapping[int, float] | Mapping[str, float] | Sequence[Sequence[float]] | None
"""Bias by token id: a mapping, whose keys JSON writes as text, or pairs of token id and bias."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """How to choose the next tokens and when to stop. Neutral values change nothing.

    Raises InvalidRequest from `validate()`; constructing one checks nothing, so that a caller sees every
    error in one place.
    """

    # Written by python -m runtime.sampling.generate, fields: begin.
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = 16
    """Tokens of output, at most; None, and what is beyond the context: as many as the context has room for.
    """
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """No stop id can be drawn before so many output tokens."""
    temperature: float = 1.0
    """Logits are divided by it; below 1e-5 the most likely id is taken, the lowest of equals."""
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] = -1
    """Keep the k most likely tokens; -1 or 0 keeps all. Of equals at the border the lowest ids stay."""
    top_p: float = 1.0
    """Keep, of what is left, renormalised, the fewest most likely ids whose probabilities reach p; at least
    one.
    """
    min_p: float = 0.0
    """Keep ids that are at least `min_p` times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of ids seen in prompt or output are divided by it when positive, multiplied when negative."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of ids in the output, once."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of ids in the output, once per occurrence."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Seed of this request's noise; None lets the client library draw one. It takes all of 64 bits, signed or
    not: -1 is none, as in vLLM, and one that is not from 0 to 2^63 - 1 stands for its remainder by 2^63.
    """
    stop: Annotated[tuple[StopText, ...], Meta(max_length=16)] = ()
    """Strings that end the output."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()
    """Token ids that end the output, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens; the caller's stop_token_ids still stop."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop word at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logit_bias: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=1024)] = ()
    """Added to the logits of the named ids."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """None: no logprobs. k: the chosen token's and the k most likely ones'."""
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    """Sequences to generate from the prompt; they share its KV."""
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    """Generate so many and keep the `n` with the highest cumulative logprob. The client library chooses: on
    the wire `n` is their number, and this is None.
    """
    stop_words_ids: Annotated[tuple[WordIds, ...], Meta(max_length=64)] = ()
    """Each a sequence of token ids that ends the output, as a stop string does."""
    bad_words: Annotated[tuple[StopText, ...], Meta(max_length=64)] = ()
    """Texts not to be generated: the tokenizer makes `bad_words_ids` of them, with and without a space."""
    bad_words_ids: Annotated[tuple[WordIds, ...], Meta(max_length=192)] = ()
    """Each a sequence of token ids whose last one is not generated where the others are the end of prompt and
    output.
    """
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=4096)] = ()
    """Nothing else is generated. Empty: everything may be."""
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=64)] = 0
    """No sequence of so many tokens comes twice in prompt and output; 0: off."""
    top_p_decay: float = 1.0
    """Factor of top_p with each output token: p is `max(top_p_min, top_p * top_p_decay**age)`. The age is the
    number of output tokens since the beginning, or since the last reset id: 0 right after it.
    """
    top_p_min: float = 0.0
    """The bound that top_p does not decay below."""
    top_p_reset_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """Token ids after which top_p begins again."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Like `logprobs`, for the prompt's tokens from the second on. Its KV is then computed, not taken from
    the cache.
    """
    return_context_logits: bool = False
    """Raw logits of each prompt position; the server must allow it."""
    return_generation_logits: bool = False
    """Raw logits of each output position; the server must allow it."""
    return_perf_metrics: bool = False
    """Times and KV pages of each sequence, with its end."""
    prompt_logprobs_start: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Position in the prompt of the last token without a logprob; what is before it is not computed for
    logprobs, and may come from the cache.
    """
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    """Keep so many of the prompt's last tokens; -1: as many as the context leaves beside `max_tokens`. None:
    a prompt that is too long is refused.
    """
    top_n_sigma: float = 0.0
    """Keep ids whose logit is at most so many standard deviations of the logits below the largest; 0 keeps
    all.
    """
    speculative_num_draft_tokens: Annotated[int, Meta(ge=0, le=64)] | None = None
    """Guesses in a step, at most, where the server speculates; 0: none. None: as many as the server says. The
    output is the same.
    """
    additional_outputs: Annotated[tuple[StopText, ...], Meta(max_length=16)] = ()
    """Names of the server's additional outputs, like `hidden_states:12`, to come with the output: a row for
    each of its tokens but the last.
    """
    gather_context: bool = False
    """Rows of `additional_outputs` for each token of the prompt, too. Its KV is then computed, not taken from
    the cache.
    """
    use_beam_search: bool = False
    """Search for the most likely sequences with `beam_width` beams; `n` of what it finds are the result, best
    first.
    """
    beam_width: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Beams of `use_beam_search`, without which it means nothing. None: as many as `best_of`, or `n`, says.
    """
    length_penalty: float | None = None
    """Score of a hypothesis of a beam search: the sum of its logprobs divided by its length to this power;
    above 0 it favours long ones. None: 1, unless the server's beam_defaults say 0.
    """
    early_stopping: Annotated[int, Meta(ge=0, le=2)] | None = None
    """When a beam search stops once `beam_width` hypotheses have ended: true or 1, at once; false or 0, when
    the best beam has no better score at its length; any other number or never, when no beam can come to a
    better one. None: false, unless the server's beam_defaults say true.
    """
    beam_search_diversity_rate: float = 0.0
    """Where a beam search compares candidates, those of its beam number i, counted from the best, have i
    times so much more. No score or logprob has it.
    """
    beam_width_array: Annotated[tuple[Annotated[int, Meta(ge=1, le=64)], ...], Meta(max_length=8)] = ()
    """Beams of a beam search behind its first token, its second and so on; the last number holds from there
    on. `beam_width` is the largest of them then.
    """
    # Written by python -m runtime.sampling.generate, fields: end.

    if TYPE_CHECKING:

        def __init__(
            self,
            # Written by python -m runtime.sampling.generate, arguments: begin.
            max_tokens: int | None = 16,
            min_tokens: int = 0,
            temperature: float = 1.0,
            top_k: int = -1,
            top_p: float = 1.0,
            min_p: float = 0.0,
            repetition_penalty: float = 1.0,
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            seed: int | None = None,
            stop: Texts = (),
            stop_token_ids: Ids = (),
            ignore_eos: bool = False,
            include_stop_str_in_output: bool = False,
            skip_special_tokens: bool = True,
            logit_bias: Bias = (),
            logprobs: int | None = None,
            n: int = 1,
            best_of: int | None = None,
            stop_words_ids: Words = (),
            bad_words: Texts = (),
            bad_words_ids: Words = (),
            allowed_token_ids: Ids = (),
            no_repeat_ngram_size: int = 0,
            top_p_decay: float = 1.0,
            top_p_min: float = 0.0,
            top_p_reset_ids: Ids = (),
            prompt_logprobs: int | None = None,
            return_context_logits: bool = False,
            return_generation_logits: bool = False,
            return_perf_metrics: bool = False,
            prompt_logprobs_start: int = 0,
            truncate_prompt_tokens: int | None = None,
            top_n_sigma: float = 0.0,
            speculative_num_draft_tokens: int | None = None,
            additional_outputs: Texts = (),
            gather_context: bool = False,
            use_beam_search: bool = False,
            beam_width: int | None = None,
            length_penalty: float | None = None,
            early_stopping: bool | int | str | None = None,
            beam_search_diversity_rate: float = 0.0,
            beam_width_array: Ids = (),
            # Written by python -m runtime.sampling.generate, arguments: end.
        ) -> None:
            """Make sampling parameters. Each argument is described at its field."""

    def validate(self) -> None:
        """Check every range and combination that needs no model. Raises InvalidRequest, which names the first
        wrong field.
        """
        values = msgspec.structs.astuple(self)
        for value, neutral, parameter in zip(values, _NEUTRAL, PARAMETERS, strict=True):
            # What was not given is mostly the very object that stands for it.
            if value is not neutral and (type(value) is not type(neutral) or value != neutral):
                parameter.check(value)
        self._check_together()
        self.check_truncation()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids against the model. Raises InvalidRequest."""
        for name, token_ids in WITH_TOKEN_IDS:
            for token in token_ids(getattr(self, name)):
                if token >= vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token} is not below the vocabulary size {vocab_size}", param=name
                    )

    def check_truncation(self, context_length: int = MAX_TOKENS_LIMIT) -> None:
        """Check `truncate_prompt_tokens`, also against the model. Raises InvalidRequest."""
        wanted = self.truncate_prompt_tokens
        if wanted == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0, which leaves no prompt; give a number to keep, or -1",
                param="truncate_prompt_tokens",
            )
        if wanted is not None and wanted > context_length:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {wanted}, the longest sequence is {context_length} tokens; "
                "-1 keeps as many as fit",
                param="truncate_prompt_tokens",
            )

    def num_kept(self, num_tokens: int, max_len: int, max_prompt_len: int | None = None) -> int:
        """Return how many of a prompt's last tokens `truncate_prompt_tokens` keeps. max_len: most tokens of a
        sequence, of which at least one is for output. max_prompt_len: most tokens of a prompt that is
        computed in one step; None: prompts may be computed in chunks.
        """
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return num_tokens
        room = max_len - 1
        if wanted == -1:
            # Who asks for as many as fit in all has asked for no share of them.
            if self.max_tokens is not None and self.max_tokens < max_len:
                room = max_len - self.max_tokens
            wanted = room if max_prompt_len is None else min(room, max_prompt_len)
        return min(num_tokens, wanted, room)

    def of_sequence(self, number: int) -> SamplingParams:
        """Return the parameters of the request's sequence `number`, from 0, when it is submitted alone."""
        if self.n == 1:
            return self
        if number == 0:
            return msgspec.structs.replace(self, n=1)
        return msgspec.structs.replace(
            self,
            n=1,
            seed=None if self.seed is None else (self.seed + number) % SEEDS,
            # They belong to the prompt, which all share: the first one brings them.
            prompt_logprobs=None,
            prompt_logprobs_start=0,
            return_context_logits=False,
            gather_context=False,
        )

    @property
    def num_beams(self) -> int:
        """Number of beams; 1 without beam search."""
        return (self.beam_width or 1) if self.use_beam_search else 1

    def _check_together(self) -> None:
        """Check combinations of fields."""
        if self.use_beam_search:
            self._check_beams()
        else:
            for name, neutral in WITHOUT_BEAMS:
                if getattr(self, name) not in neutral:
                    raise InvalidRequest(f"{name}: set use_beam_search, or leave it out", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}",
                param="min_tokens",
            )
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequest(
                "prompt_logprobs_start: without prompt_logprobs there are none to begin; set both",
                param="prompt_logprobs_start",
            )
        if self.gather_context and not self.additional_outputs:
            raise InvalidRequest(
                "gather_context: without additional_outputs there is nothing to gather; set both",
                param="gather_context",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(
                f"best_of is {self.best_of}, less than n, which is {self.n}", param="best_of"
            )

    def _check_beams(self) -> None:
        width = self.beam_width or max(self.beam_width_array, default=0) or self.best_of or self.n
        if self.beam_width_array and width != max(self.beam_width_array):
            raise InvalidRequest(
                f"beam_width_array: its largest is {max(self.beam_width_array)}, but beam_width {width}",
                param="beam_width_array",
            )
        if self.n > width:
            raise InvalidRequest(f"n is {self.n}, more than beam_width, which is {width}", param="n")
        if self.temperature >= GREEDY_BELOW and self.temperature != 1.0:
            raise InvalidRequest(
                f"temperature is {self.temperature:g}: a beam search draws nothing; leave it out, or 0",
                param="temperature",
            )


_NEUTRAL = tuple(
    default if type(default) is type(p.neutral) and default == p.neutral else p.neutral
    for default, p in zip(msgspec.structs.astuple(SamplingParams()), PARAMETERS, strict=True)
)
"""Neutral values, as the very objects that fields which are not given have."""
