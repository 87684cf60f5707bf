"""PARAMETERS: the table of all sampling parameters, with everything that is known about each. `python -m
runtime.sampling.generate` writes the text in other files from it; checks, columns and features are derived
when needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from runtime.sampling import features as bit
from runtime.sampling.kinds import (
    MAX_WORD_IDS,
    Biases,
    Counts,
    Flag,
    IdsKind,
    Integer,
    Kind,
    Number,
    Seed,
    Stopping,
    TextOrTexts,
    TextsKind,
    WordsKind,
)

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 1 << 24
MAX_TOP_K = 1 << 24
MAX_SEQUENCES = 128
MAX_BEAMS = 64
MAX_WIDTHS = 8
MAX_WORDS = 64
MAX_NGRAM = 64
SEEDS = 1 << 63
MAX_ALLOWED_IDS = 4096
MAX_DRAFT_TOKENS = 64
MAX_OUTPUTS = 16

GREEDY_BELOW = 1e-5
"""Temperature below which the most likely id is taken (greedy sampling)."""

LEAST_SIGMA = 1e-30
"""Least top_n_sigma: a smaller one would be 0 in float32, which keeps all ids."""
LEAST_REPETITION = 1e-30
"""Least repetition_penalty: a logit divided by a smaller one would be infinite in float32."""

ColumnType: TypeAlias = Literal["float32", "int64"]
Family: TypeAlias = Literal["openai", "sglang"]


class Stay(NamedTuple):
    """State of one stay in a row that its columns depend on besides the parameters."""

    min_len: int = 0
    """Position below which no stop id is sampled (prompt length + min_tokens)."""
    top_p_age: int = 0
    """Number of output tokens since the start or the last reset id."""


NEW_STAY = Stay()
"""Stay of nearly every request: without min_tokens and without decay of top_p."""


class Column(NamedTuple):
    """One number of each row on the device."""

    name: str
    type: ColumnType
    value: Callable[[Any, Stay], float]
    """Function that computes the number that kernels read, from SamplingParams and the stay. Called only if
    the parameter is not neutral.
    """
    doc: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    kind: Kind
    neutral: Any
    """Default of the parameter. Except for `max_tokens` it has no effect."""
    doc: str = ""
    step: str = ""
    """Step of the sampler in which the parameter is applied; empty: it does not affect the draw."""
    nullable: bool = False
    columns: tuple[Column, ...] = ()
    also_neutral: tuple[Any, ...] = ()
    """Further values that have no effect."""
    feature: Callable[[Any], int] = lambda value: 0
    """Function that returns the feature bits which a value needs."""
    example: Any = None
    """A value with an effect, for a parameter that reaches the device."""
    bodies: tuple[Family, ...] = ("openai", "sglang")
    """Families of HTTP bodies that have it as a field of this kind."""
    sglang: str = ""
    """Name of the parameter in SGLang, if it differs."""
    array: str = ""
    """Name of the batch manager's array for the parameter."""
    aliases: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Other names of the array, with values that have no effect. HTTP refuses these fields with any other
    value.
    """
    is_own: bool = False
    """True if nearly every request has a value of its own."""
    recommended: tuple[str, str] = ("", "")
    """Key of generation_config.json, and the type of its value."""

    def check(self, value: Any) -> None:
        """Check a value. Raises InvalidRequest, which names the parameter."""
        if value is not None or not self.nullable:
            self.kind.check(self.name, value)


def _unless(neutral: Any, bits: int) -> Callable[[Any], int]:
    return lambda value: 0 if value == neutral else bits


def _above_zero(bits: int) -> Callable[[Any], int]:
    return lambda value: bits if value > 0 else 0


def _bad_words(words: tuple[tuple[int, ...], ...]) -> int:
    if not words:
        return 0
    return bit.BAD_WORDS | (bit.HISTORY if any(len(word) > 1 for word in words) else 0)


NUM_SEQUENCES = Integer(low=1, high=MAX_SEQUENCES)
NUM_TOKENS = Integer(low=0, high=MAX_TOKENS_LIMIT)
NUM_LOGPROBS = Integer(low=0, high=MAX_LOGPROBS)
PENALTY = Number(low=-2.0, high=2.0)
SHARE = Number(low=0.0, high=1.0)
SHARE_ABOVE_ZERO = Number(low=0.0, high=1.0, above=True)

PARAMETERS: tuple[Parameter, ...] = (
    # In the order of the arguments of SamplingParams, so a new one comes last.
    Parameter(
        name="max_tokens",
        kind=Integer(low=1, high=MAX_TOKENS_LIMIT),
        neutral=16,
        nullable=True,
        doc="Tokens of output, at most; None, and what is beyond the context: as many as the context has "
        "room for.",
        bodies=("sglang",),
        sglang="max_new_tokens",
        array="request_output_len",
        recommended=("max_new_tokens", "PositiveInt"),
    ),
    Parameter(
        name="min_tokens",
        kind=NUM_TOKENS,
        neutral=0,
        step="4",
        doc="No stop id can be drawn before so many output tokens.",
        columns=(
            Column(
                "min_len", "int64", lambda p, stay: stay.min_len, "no stop id is drawn at a position below it"
            ),
        ),
        sglang="min_new_tokens",
        array="min_tokens",
        aliases={"min_length": (0,)},
    ),
    Parameter(
        name="temperature",
        kind=Number(low=0.0, high=100.0),
        neutral=1.0,
        step="6",
        doc="Logits are divided by it; below 1e-5 the most likely id is taken, the lowest of equals.",
        columns=(
            Column("temperature", "float32", lambda p, stay: max(p.temperature, GREEDY_BELOW)),
            Column("is_greedy", "int64", lambda p, stay: p.temperature < GREEDY_BELOW),
        ),
        feature=lambda value: bit.NOISE if value >= GREEDY_BELOW else 0,
        example=0.8,
        array="temperature",
        recommended=("temperature", "Annotated[float, msgspec.Meta(ge=0)]"),
    ),
    Parameter(
        name="top_k",
        kind=Integer(low=-1, high=MAX_TOP_K),
        neutral=-1,
        step="8",
        doc="Keep the k most likely tokens; -1 or 0 keeps all. Of equals at the border the lowest ids stay.",
        columns=(Column("top_k", "int64", lambda p, stay: max(p.top_k, 0), "0: all"),),
        also_neutral=(0,),
        feature=_above_zero(bit.TOP_K),
        example=1000,
        array="top_k",
        aliases={"runtime_top_k": ()},
        recommended=("top_k", "Annotated[int, msgspec.Meta(ge=-1)]"),
    ),
    Parameter(
        name="top_p",
        kind=SHARE_ABOVE_ZERO,
        neutral=1.0,
        step="9",
        doc="Keep, of what is left, renormalised, the fewest most likely ids whose probabilities reach p; at "
        "least one.",
        columns=(Column("top_p", "float32", lambda p, stay: p.top_p),),
        feature=lambda value: bit.TOP_P if value < 1.0 else 0,
        example=0.9,
        array="top_p",
        aliases={"runtime_top_p": ()},
        recommended=("top_p", "Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]"),
    ),
    Parameter(
        name="min_p",
        kind=SHARE,
        neutral=0.0,
        step="10",
        doc="Keep ids that are at least `min_p` times as likely as the most likely one.",
        columns=(
            Column(
                "min_logit_gap",
                "float32",
                lambda p, stay: math.log(p.min_p) if p.min_p > 0.0 else -math.inf,
                "log of min-p: ids further below the largest are cut off",
            ),
        ),
        feature=_above_zero(bit.MIN_P),
        example=1e-6,
        array="min_p",
    ),
    Parameter(
        name="repetition_penalty",
        kind=Number(low=0.0, high=10.0, above=True),
        neutral=1.0,
        step="1",
        doc="Logits of ids seen in prompt or output are divided by it when positive, multiplied when "
        "negative.",
        columns=(
            Column("repetition", "float32", lambda p, stay: max(p.repetition_penalty, LEAST_REPETITION)),
        ),
        feature=_unless(1.0, bit.PENALTY),
        example=1.1,
        array="repetition_penalty",
        recommended=("repetition_penalty", "PositiveFloat"),
    ),
    Parameter(
        name="presence_penalty",
        kind=PENALTY,
        neutral=0.0,
        step="2",
        doc="Subtracted from the logits of ids in the output, once.",
        columns=(Column("presence", "float32", lambda p, stay: p.presence_penalty),),
        feature=_unless(0.0, bit.PENALTY),
        example=1.0,
        array="presence_penalty",
    ),
    Parameter(
        name="frequency_penalty",
        kind=PENALTY,
        neutral=0.0,
        step="2",
        doc="Subtracted from the logits of ids in the output, once per occurrence.",
        columns=(Column("frequency", "float32", lambda p, stay: p.frequency_penalty),),
        feature=_unless(0.0, bit.PENALTY),
        example=1.0,
        array="frequency_penalty",
    ),
    Parameter(
        name="seed",
        kind=Seed(low=-SEEDS, high=2 * SEEDS - 1),
        neutral=None,
        nullable=True,
        step="11",
        doc="Seed of this request's noise; None lets the client library draw one. It takes all of 64 bits, "
        "signed or not: -1 is none, as in vLLM, and one that is not from 0 to 2^63 - 1 stands for its "
        "remainder by 2^63.",
        columns=(Column("seed", "int64", lambda p, stay: p.seed or 0),),
        is_own=True,
        sglang="sampling_seed",
        array="seed",
        aliases={"random_seed": ()},
    ),
    Parameter(
        name="stop",
        kind=TextOrTexts(max_length=MAX_STOP_STRINGS),
        neutral=(),
        doc="Strings that end the output.",
    ),
    Parameter(
        name="stop_token_ids",
        kind=IdsKind(max_length=MAX_STOP_TOKEN_IDS),
        neutral=(),
        doc="Token ids that end the output, beside the model's own.",
    ),
    Parameter(
        name="ignore_eos",
        kind=Flag(),
        neutral=False,
        doc="Go on past the model's own end tokens; the caller's stop_token_ids still stop.",
    ),
    Parameter(
        name="include_stop_str_in_output",
        kind=Flag(),
        neutral=False,
        doc="Keep the stop string or stop word at the end of the text.",
        sglang="no_stop_trim",
    ),
    Parameter(
        name="skip_special_tokens",
        kind=Flag(),
        neutral=True,
        doc="Leave special tokens out of the text.",
    ),
    Parameter(
        name="logit_bias",
        kind=Biases(max_length=MAX_LOGIT_BIAS, bias=Number(low=-MAX_BIAS, high=MAX_BIAS)),
        neutral=(),
        step="3",
        doc="Added to the logits of the named ids.",
        feature=_unless((), bit.BIAS),
        example=((0, 1.0),),
    ),
    Parameter(
        name="logprobs",
        kind=NUM_LOGPROBS,
        neutral=None,
        nullable=True,
        doc="None: no logprobs. k: the chosen token's and the k most likely ones'.",
        columns=(
            Column(
                "num_logprobs",
                "int64",
                lambda p, stay: -1 if p.logprobs is None else p.logprobs,
                "-1: none; k: the chosen token's and the k most likely ones'",
            ),
        ),
        feature=_unless(None, bit.LOGPROBS),
        example=1,
        bodies=(),
    ),
    Parameter(
        name="n",
        kind=NUM_SEQUENCES,
        neutral=1,
        doc="Sequences to generate from the prompt; they share its KV.",
    ),
    Parameter(
        name="best_of",
        kind=NUM_SEQUENCES,
        neutral=None,
        nullable=True,
        doc="Generate so many and keep the `n` with the highest cumulative logprob. The client library "
        "chooses: on the wire `n` is their number, and this is None.",
    ),
    Parameter(
        name="stop_words_ids",
        kind=WordsKind(max_length=MAX_WORDS),
        neutral=(),
        doc="Each a sequence of token ids that ends the output, as a stop string does.",
        array="stop_words_list",
    ),
    Parameter(
        name="bad_words",
        kind=TextsKind(max_length=MAX_WORDS),
        neutral=(),
        doc="Texts not to be generated: the tokenizer makes `bad_words_ids` of them, with and without a "
        "space.",
    ),
    Parameter(
        name="bad_words_ids",
        kind=WordsKind(max_length=3 * MAX_WORDS),
        neutral=(),
        step="4",
        doc="Each a sequence of token ids whose last one is not generated where the others are the end of "
        "prompt and output.",
        feature=_bad_words,
        example=((0,),),
        array="bad_words_list",
    ),
    Parameter(
        name="allowed_token_ids",
        kind=IdsKind(max_length=MAX_ALLOWED_IDS, json_min_length=1),
        neutral=(),
        step="4",
        doc="Nothing else is generated. Empty: everything may be.",
        feature=_unless((), bit.ALLOWED),
        example=(0,),
    ),
    Parameter(
        name="no_repeat_ngram_size",
        kind=Integer(low=0, high=MAX_NGRAM),
        neutral=0,
        step="4",
        doc="No sequence of so many tokens comes twice in prompt and output; 0: off.",
        columns=(
            Column("ngram", "int64", lambda p, stay: p.no_repeat_ngram_size, "size of the n-grams; 0: off"),
        ),
        feature=_above_zero(bit.NGRAM | bit.HISTORY),
        example=2,
        array="no_repeat_ngram_size",
    ),
    Parameter(
        name="top_p_decay",
        kind=SHARE_ABOVE_ZERO,
        neutral=1.0,
        step="9",
        doc="Factor of top_p with each output token: p is `max(top_p_min, top_p * top_p_decay**age)`. The "
        "age is the number of output tokens since the beginning, or since the last reset id: 0 right after "
        "it.",
        columns=(
            Column("top_p_decay", "float32", lambda p, stay: p.top_p_decay),
            Column(
                "top_p_age", "int64", lambda p, stay: stay.top_p_age, "output tokens since the last reset"
            ),
        ),
        feature=_unless(1.0, bit.TOP_P | bit.TOP_P_DECAY),
        example=0.9,
        array="top_p_decay",
    ),
    Parameter(
        name="top_p_min",
        kind=SHARE,
        neutral=0.0,
        step="9",
        doc="The bound that top_p does not decay below.",
        # Only a decay is limited by it.
        columns=(
            Column("top_p_min", "float32", lambda p, stay: p.top_p_min if p.top_p_decay != 1.0 else 0.0),
        ),
        array="top_p_min",
    ),
    Parameter(
        name="top_p_reset_ids",
        kind=IdsKind(max_length=MAX_WORD_IDS),
        neutral=(),
        step="9",
        doc="Token ids after which top_p begins again.",
    ),
    Parameter(
        name="prompt_logprobs",
        kind=NUM_LOGPROBS,
        neutral=None,
        nullable=True,
        doc="Like `logprobs`, for the prompt's tokens from the second on. Its KV is then computed, not taken "
        "from the cache.",
        bodies=("openai",),
    ),
    Parameter(
        name="return_context_logits",
        kind=Flag(),
        neutral=False,
        doc="Raw logits of each prompt position; the server must allow it.",
        bodies=("sglang",),
    ),
    Parameter(
        name="return_generation_logits",
        kind=Flag(),
        neutral=False,
        doc="Raw logits of each output position; the server must allow it.",
        feature=_unless(False, bit.LOGITS),
        example=True,
        bodies=("sglang",),
    ),
    Parameter(
        name="return_perf_metrics",
        kind=Flag(),
        neutral=False,
        doc="Times and KV pages of each sequence, with its end.",
        bodies=(),
    ),
    Parameter(
        name="prompt_logprobs_start",
        kind=NUM_TOKENS,
        neutral=0,
        doc="Position in the prompt of the last token without a logprob; what is before it is not computed "
        "for logprobs, and may come from the cache.",
        bodies=(),
    ),
    Parameter(
        name="truncate_prompt_tokens",
        kind=Integer(low=-1, high=MAX_TOKENS_LIMIT),
        neutral=None,
        nullable=True,
        doc="Keep so many of the prompt's last tokens; -1: as many as the context leaves beside "
        "`max_tokens`. None: a prompt that is too long is refused.",
    ),
    Parameter(
        name="top_n_sigma",
        kind=Number(low=0.0, high=1e6),
        neutral=0.0,
        step="7",
        doc="Keep ids whose logit is at most so many standard deviations of the logits below the largest; "
        "0 keeps all.",
        columns=(
            Column(
                "top_n_sigma",
                "float32",
                lambda p, stay: max(p.top_n_sigma, LEAST_SIGMA) if p.top_n_sigma > 0.0 else 0.0,
                "ids more standard deviations below the largest are cut off; 0: none",
            ),
        ),
        feature=_above_zero(bit.TOP_N_SIGMA),
        example=100.0,
        array="top_n_sigma",
    ),
    Parameter(
        name="speculative_num_draft_tokens",
        kind=Integer(low=0, high=MAX_DRAFT_TOKENS),
        neutral=None,
        nullable=True,
        also_neutral=(0,),
        doc="Guesses in a step, at most, where the server speculates; 0: none. None: as many as the server "
        "says. The output is the same.",
    ),
    Parameter(
        name="additional_outputs",
        kind=TextsKind(max_length=MAX_OUTPUTS),
        neutral=(),
        doc="Names of the server's additional outputs, like `hidden_states:12`, to come with the output: a "
        "row for each of its tokens but the last.",
        bodies=("sglang",),
    ),
    Parameter(
        name="gather_context",
        kind=Flag(),
        neutral=False,
        doc="Rows of `additional_outputs` for each token of the prompt, too. Its KV is then computed, not "
        "taken from the cache.",
        bodies=("sglang",),
    ),
    Parameter(
        name="use_beam_search",
        kind=Flag(),
        neutral=False,
        doc="Search for the most likely sequences with `beam_width` beams; `n` of what it finds are the "
        "result, best first.",
    ),
    Parameter(
        name="beam_width",
        kind=Integer(low=1, high=MAX_BEAMS),
        neutral=None,
        nullable=True,
        doc="Beams of `use_beam_search`, without which it means nothing. None: as many as `best_of`, or `n`, "
        "says.",
    ),
    Parameter(
        name="length_penalty",
        kind=Number(low=-10.0, high=10.0),
        neutral=None,
        nullable=True,
        array="len_penalty",
        doc="Score of a hypothesis of a beam search: the sum of its logprobs divided by its length to this "
        "power; above 0 it favours long ones. None: 1, unless the server's beam_defaults say 0.",
    ),
    Parameter(
        name="early_stopping",
        kind=Stopping(),
        neutral=None,
        nullable=True,
        array="early_stopping",
        doc="When a beam search stops once `beam_width` hypotheses have ended: true or 1, at once; false or "
        "0, when the best beam has no better score at its length; any other number or never, when no beam "
        "can come to a better one. None: false, unless the server's beam_defaults say true.",
    ),
    Parameter(
        name="beam_search_diversity_rate",
        kind=Number(low=-100.0, high=100.0),
        neutral=0.0,
        array="beam_search_diversity_rate",
        doc="Where a beam search compares candidates, those of its beam number i, counted from the best, "
        "have i times so much more. No score or logprob has it.",
    ),
    Parameter(
        name="beam_width_array",
        kind=Counts(high=MAX_BEAMS, max_length=MAX_WIDTHS),
        neutral=(),
        doc="Beams of a beam search behind its first token, its second and so on; the last number holds from "
        "there on. `beam_width` is the largest of them then.",
    ),
)
