"""SamplingParams: the parameters of one generation. `validate()` refuses bad values by the field's name.

Field names and neutral values are those that users of vLLM, SGLang and TensorRT-LLM type; the order in which
the sampler applies them is in docs/sampling.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.base.random_ids import random_id
from runtime.sampling.kinds import MAX_STOP_CHARS, MAX_TOKEN_ID, MAX_WORD_IDS, IdKind
from runtime.sampling.table import GREEDY_BELOW, MAX_TOKENS_LIMIT, PARAMETERS, SEEDS

TokenId = Annotated[int, Meta(ge=0, lt=MAX_TOKEN_ID + 1)]
WordIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_WORD_IDS)]
StopText = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]


_WITH_TOKEN_IDS = tuple((p.name, p.kind.token_ids) for p in PARAMETERS if isinstance(p.kind, IdKind))
_token_ids_of = attrgetter(*[name for name, _ in _WITH_TOKEN_IDS])

WITHOUT_BEAMS = (
    *(("length_penalty", (None, 1.0)), ("early_stopping", (None, 0, 1))),
    *(("beam_search_diversity_rate", (0.0,)), ("beam_width_array", ((),))),
)
"""Values that callers write who do not search."""
_beam_values_of = attrgetter(*[name for name, _ in WITHOUT_BEAMS])
_NO_BEAM_VALUES = tuple(values[0] for _, values in WITHOUT_BEAMS)

# Types that callers may use; the client library converts them to those of the fields.
Texts: TypeAlias = str | Sequence[str] | None
Ids: TypeAlias = Sequence[int] | None
Words: TypeAlias = Sequence[Sequence[int]] | None
Bias: TypeAlias = Mapping[int, float] | Mapping[str, float] | Sequence[Sequence[float]] | None
"""Bias by token id: a mapping, whose keys JSON writes as text, or pairs of token id and bias."""


_GUIDE = (
    "a guide is an argument of the call: structured_outputs=StructuredOutputsParams(...), or "
    "guided_decoding_params of a GenerationRequest"
)
_PROCESSORS = (
    "the launch names processors (--logits-processor), and the call's logits_processors which of them"
)
ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("guided_decoding", "structured_outputs", "json_schema", "regex", "ebnf"), _GUIDE),
    **dict.fromkeys(("logits_processors", "logits_processor", "apply_batched_logits_processor"), _PROCESSORS),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), "it is called max_tokens"),
    **dict.fromkeys(("sampling_seed", "random_seed"), "it is called seed"),
    "min_new_tokens": "it is called min_tokens",
    "no_stop_trim": "it is called include_stop_str_in_output",
    "bad": "it is called bad_words",
    "end_id": "give it in stop_token_ids, with ignore_eos=True",
    "pad_id": "outputs are not padded; leave it out",
    "detokenize": "--skip-tokenizer-init is for a server without text; leave it out",
    "output_kind": "generate returns whole outputs, and stream what is new",
    "add_special_tokens": "it is an argument of the call",
    "exclude_input_from_output": "it is a field of GenerationRequest",
    "structural_tag": _GUIDE,
    "embedding_bias": "it is called logit_bias, a mapping from token id to bias",
    "bad_token_ids": "it is called bad_words_ids, a list of ids for each",
    "additional_model_outputs": "additional_outputs has the names of outputs of the launch",
    "lookahead_config": "--speculative-algorithm NGRAM guesses tokens, for all requests of a launch",
    "prompt_ignore_length": "penalties count the whole prompt; leave it out",
    "return_encoder_output": "models with an encoder are not built; leave it out",
    "spaces_between_special_tokens": "text is as the tokenizer decodes it; leave it out",
    "flat_logprobs": "logprobs are flat columns as they are; leave it out",
    "extra_args": "logits_processors of the call take arguments",
    "repetition_detection": "a loop is not looked for; docs/sampling.md has what forbids repetition",
    "thinking_token_budget": "there is no budget of its own for thinking; max_tokens counts all",
    "skip_reading_prefix_cache": "prompt_logprobs and --disable-radix-cache do so; leave it out",
    "stop_regex": "stop takes texts, and stop_words_ids sequences of ids",
    "custom_params": _PROCESSORS,
    "stream_interval": "it is a setting of the launch, --stream-interval",
}
"""Advice for names that SamplingParams of vLLM, SGLang or TensorRT-LLM have."""
NOTHING_ASKED: Mapping[str, Any] = {
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), True),
    **dict.fromkeys(("add_special_tokens", "exclude_input_from_output"), True),
    **dict.fromkeys(("apply_batched_logits_processor", "return_encoder_output", "flat_logprobs"), False),
    "no_stop_trim": False,
    "min_new_tokens": 0,
}
"""Defaults of these names other than None. A caller that passes them on asks for nothing."""
_NULLABLE = frozenset(p.name for p in PARAMETERS if p.nullable)


class _Named(msgspec.StructMeta):
    """Metaclass of SamplingParams as others construct theirs: None is no value, neither are their defaults of
    what it lacks, and a wrong keyword says more. What is decoded does not pass here.
    """

    def __call__(self, *values: Any, **fields: Any) -> Any:
        if any(value is None for value in fields.values()):
            fields = {name: value for name, value in fields.items() if not _is_unset(name, value)}
        try:
            return super().__call__(*values, **fields)
        except TypeError:
            for name, value in fields.items():
                if name in NOTHING_ASKED and value == NOTHING_ASKED[name]:
                    del fields[name]
                    return self(*values, **fields)
                if (advice := ELSEWHERE.get(name)) is not None:
                    raise TypeError(f"{self.__name__} has no {name}: {advice}") from None
            raise


def _is_unset(name: str, value: object) -> bool:
    """Return True for None where it stands for a default, or for nothing at all."""
    is_known = name in ELSEWHERE or (name in SamplingParams.__struct_fields__ and name not in _NULLABLE)
    return value is None and is_known


class SamplingParams(
    msgspec.Struct, metaclass=_Named, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """Parameters that say how to choose the next tokens and when to stop. Neutral values change nothing.

    Raises InvalidRequest from `validate()`; constructing one checks nothing, so that a caller sees every
    error in one place.
    """

    # Written by python -m runtime.sampling.generate, fields: begin.
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = 16
    """Maximum number of output tokens. None, or more than the context has room for: as many as there is room
    for.
    """
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Minimum number of output tokens: no stop id is drawn before."""
    temperature: float = 1.0
    """Divisor of the logits. Below 1e-5 the most likely id is taken; of equally likely ids, the lowest."""
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] = -1
    """Number of most likely ids to keep; -1 or 0 keeps all. Among equals at the limit the lowest ids stay."""
    top_p: float = 1.0
    """Probability mass to keep: the fewest most likely ids whose probabilities, renormalised after the steps
    before, add up to at least this; always at least one id.
    """
    min_p: float = 0.0
    """Least probability of an id that is kept, as a share of the most likely id's."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, for ids that occur in the prompt or the
    output.
    """
    presence_penalty: float = 0.0
    """Amount that is subtracted once from the logit of each id in the output."""
    frequency_penalty: float = 0.0
    """Amount that is subtracted from the logit of an id for each of its occurrences in the output."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Seed of the request's random numbers. None or -1: the client library draws one. Any 64-bit integer,
    signed or unsigned; outside 0 to 2^63 - 1 its remainder modulo 2^63 is used.
    """
    stop: Annotated[tuple[StopText, ...], Meta(max_length=16)] = ()
    """Strings that end the output."""
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1024)] = ()
    """Token ids that end the output, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue past the model's own end tokens. The request's stop_token_ids still end the output."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop word at the end of the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logit_bias: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=1024)] = ()
    """Amounts that are added to the logits of the given ids."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Number k of most likely tokens to report logprobs for, in addition to the chosen token's. None: no
    logprobs.
    """
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    """Number of sequences to generate from the prompt. They share its KV."""
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    """Number of sequences to generate, of which the `n` with the highest cumulative logprob are returned. The
    client library selects them: on the wire `n` is the number to generate, and this is None.
    """
    stop_words_ids: Annotated[tuple[WordIds, ...], Meta(max_length=64)] = ()
    """Sequences of token ids, each of which ends the output as a stop string does."""
    bad_words: Annotated[tuple[StopText, ...], Meta(max_length=64)] = ()
    """Texts that may not be generated. The tokenizer turns them into `bad_words_ids`, with and without a
    leading space.
    """
    bad_words_ids: Annotated[tuple[WordIds, ...], Meta(max_length=192)] = ()
    """Sequences of token ids that may not be generated: the last id of one is forbidden where prompt and
    output end with its other ids.
    """
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=4096)] = ()
    """The only token ids that may be generated. Empty: all."""
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=64)] = 0
    """Length of token sequences that may not occur twice in prompt and output. 0: no limit."""
    top_p_decay: float = 1.0
    """Factor of top_p for each output token: it becomes `max(top_p_min, top_p * top_p_decay**age)`, where age
    is the number of output tokens since the start or since the last reset id (0 right after one).
    """
    top_p_min: float = 0.0
    """Lower limit of the decay of top_p."""
    top_p_reset_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """Token ids after which the decay of top_p starts again."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Like `logprobs`, for the prompt's tokens from the second on. The prompt's KV is then computed, not
    taken from the cache.
    """
    return_context_logits: bool = False
    """Return the raw logits of each prompt position. The server must allow it."""
    return_generation_logits: bool = False
    """Return the raw logits of each output position. The server must allow it."""
    return_perf_metrics: bool = False
    """Return times and numbers of KV pages of each sequence with its end."""
    prompt_logprobs_start: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Position of the last prompt token without a logprob. Logprobs of the tokens before it are not computed,
    and their KV may come from the cache.
    """
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    """Number of the prompt's last tokens to keep. -1: as many as the context has room for beside
    `max_tokens`. None: a prompt that is too long is refused.
    """
    top_n_sigma: float = 0.0
    """Largest distance of a kept id's logit below the largest logit, in standard deviations of the logits. 0
    keeps all.
    """
    speculative_num_draft_tokens: Annotated[int, Meta(ge=0, le=64)] | None = None
    """Maximum number of guessed tokens in a step, if the server speculates. 0: none. None: the server's
    number. It does not change the output.
    """
    additional_outputs: Annotated[tuple[StopText, ...], Meta(max_length=16)] = ()
    """Names of additional outputs of the server, such as `hidden_states:12`, to return: one row for each
    output token except the last.
    """
    gather_context: bool = False
    """Return rows of `additional_outputs` for each prompt token, too. The prompt's KV is then computed, not
    taken from the cache.
    """
    use_beam_search: bool = False
    """Search for the most likely sequences with `beam_width` beams. The best `n` hypotheses are returned,
    best first.
    """
    beam_width: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Number of beams; without `use_beam_search` it has no effect. None: the largest of `beam_width_array`,
    or else `best_of`, or else `n`.
    """
    length_penalty: float | None = None
    """Exponent of the length in a hypothesis's score, which is the sum of its logprobs divided by its length
    to this power; above 0 it favours long hypotheses. None: 1, unless the server's beam_defaults say 0.
    """
    early_stopping: Annotated[int, Meta(ge=0, le=2)] | None = None
    """Rule by which a beam search stops once `beam_width` hypotheses have ended. true or 1: at once. false or
    0: when the best beam has no better score at its length. Any other number or "never": when no beam can
    reach a better score. None: false, unless the server's beam_defaults say true.
    """
    beam_search_diversity_rate: float = 0.0
    """Bonus for candidates of lower beams: where candidates are compared, those of beam number i, counted
    from the best, get i times this added. Scores and logprobs do not include it.
    """
    beam_width_array: Annotated[tuple[Annotated[int, Meta(ge=1, le=64)], ...], Meta(max_length=8)] = ()
    """Number of beams after the first output token, after the second and so on; the last number holds from
    there on. `beam_width` must be its largest number, or None.
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
        # An argument that was not given is mostly the default object itself. A loop over all would take ten
        # bytecodes for each.
        given = compress(zip(values, _NEUTRAL, PARAMETERS, strict=True), map(is_not, values, _NEUTRAL))
        for value, neutral, parameter in given:
            if type(value) is not type(neutral) or value != neutral:
                parameter.check(value)
        self._check_together()
        self.check_truncation()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids against the model. Raises InvalidRequest."""
        values = _token_ids_of(self)
        for (name, token_ids), value in compress(zip(_WITH_TOKEN_IDS, values, strict=True), values):
            for token in token_ids(value):
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
            # A max_tokens of the whole context or more asks for all the room there is, and none is kept.
            if self.max_tokens is not None and self.max_tokens < max_len:
                room = max_len - self.max_tokens
            wanted = room if max_prompt_len is None else min(room, max_prompt_len)
        return min(num_tokens, wanted, room)

    def of_all_sequences(self, number: int) -> SamplingParams:
        """Return the parameters without those that differ between the request's sequences, which are the same
        for each result of `of_sequence`. number: of the sequence whose parameters these are; 0 for the
        request's own.
        """
        return msgspec.structs.replace(
            self,
            n=1,
            seed=None if self.seed is None else (self.seed - number) % SEEDS,
            prompt_logprobs=None,
            prompt_logprobs_start=0,
            return_context_logits=False,
            gather_context=False,
        )

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
            # They belong to the prompt, which all sequences share: the first one brings them.
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
            values = _beam_values_of(self)
            if values != _NO_BEAM_VALUES:
                _check_without_beams(values)
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


def _check_without_beams(values: Sequence[Any]) -> None:
    for (name, neutral), value in zip(WITHOUT_BEAMS, values, strict=True):
        if value not in neutral:
            raise InvalidRequest(f"{name}: set use_beam_search, or leave it out", param=name)


def drawn_seed() -> int:
    """Return a random seed."""
    return int(random_id(), 16) % SEEDS
