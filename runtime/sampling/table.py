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
Family: TypeAlias = Literal["openai", "sglang", "anthropic"]


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
    is_shown: bool = False
    """True if the answers of /v1/responses repeat its value."""

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
        doc="Maximum number of output tokens. None, or more than the context has room for: as many as there "
        "is room for.",
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
        doc="Minimum number of output tokens: no stop id is drawn before.",
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
        doc="Divisor of the logits. Below 1e-5 the most likely id is taken; of equally likely ids, the "
        "lowest.",
        bodies=("openai", "sglang", "anthropic"),
        columns=(
            Column("temperature", "float32", lambda p, stay: max(p.temperature, GREEDY_BELOW)),
            Column("is_greedy", "int64", lambda p, stay: p.temperature < GREEDY_BELOW),
        ),
        feature=lambda value: bit.NOISE if value >= GREEDY_BELOW else 0,
        example=0.8,
        array="temperature",
        recommended=("temperature", "Annotated[float, msgspec.Meta(ge=0)]"),
        is_shown=True,
    ),
    Parameter(
        name="top_k",
        kind=Integer(low=-1, high=MAX_TOP_K),
        neutral=-1,
        step="8",
        doc="Number of most likely ids to keep; -1 or 0 keeps all. Among equals at the limit the lowest ids "
        "stay.",
        bodies=("openai", "sglang", "anthropic"),
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
        doc="Probability mass to keep: the fewest most likely ids whose probabilities, renormalised after "
        "the steps before, add up to at least this; always at least one id.",
        bodies=("openai", "sglang", "anthropic"),
        columns=(Column("top_p", "float32", lambda p, stay: p.top_p),),
        feature=lambda value: bit.TOP_P if value < 1.0 else 0,
        example=0.9,
        array="top_p",
        aliases={"runtime_top_p": ()},
        recommended=("top_p", "Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]"),
        is_shown=True,
    ),
    Parameter(
        name="min_p",
        kind=SHARE,
        neutral=0.0,
        step="10",
        doc="Least probability of an id that is kept, as a share of the most likely id's.",
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
        doc="Divisor of positive logits, and factor of negative ones, for ids that occur in the prompt or "
        "the output.",
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
        doc="Amount that is subtracted once from the logit of each id in the output.",
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
        doc="Amount that is subtracted from the logit of an id for each of its occurrences in the output.",
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
        doc="Seed of the request's random numbers. None or -1: the client library draws one. Any 64-bit "
        "integer, signed or unsigned; outside 0 to 2^63 - 1 its remainder modulo 2^63 is used.",
        bodies=("openai", "sglang", "anthropic"),
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
        doc="Token ids that end the output, in addition to the model's own.",
    ),
    Parameter(
        name="ignore_eos",
        kind=Flag(),
        neutral=False,
        doc="Continue past the model's own end tokens. The request's stop_token_ids still end the output.",
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
        doc="Amounts that are added to the logits of the given ids.",
        feature=_unless((), bit.BIAS),
        example=((0, 1.0),),
    ),
    Parameter(
        name="logprobs",
        kind=NUM_LOGPROBS,
        neutral=None,
        nullable=True,
        doc="Number k of most likely tokens to report logprobs for, in addition to the chosen token's. "
        "None: no logprobs.",
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
        doc="Number of sequences to generate from the prompt. They share its KV.",
    ),
    Parameter(
        name="best_of",
        kind=NUM_SEQUENCES,
        neutral=None,
        nullable=True,
        doc="Number of sequences to generate, of which the `n` with the highest cumulative logprob are "
        "returned. The client library selects them: on the wire `n` is the number to generate, and this is "
        "None.",
    ),
    Parameter(
        name="stop_words_ids",
        kind=WordsKind(max_length=MAX_WORDS),
        neutral=(),
        doc="Sequences of token ids, each of which ends the output as a stop string does.",
        array="stop_words_list",
    ),
    Parameter(
        name="bad_words",
        kind=TextsKind(max_length=MAX_WORDS),
        neutral=(),
        doc="Texts that may not be generated. The tokenizer turns them into `bad_words_ids`, with and "
        "without a leading space.",
    ),
    Parameter(
        name="bad_words_ids",
        kind=WordsKind(max_length=3 * MAX_WORDS),
        neutral=(),
        step="4",
        doc="Sequences of token ids that may not be generated: the last id of one is forbidden where prompt "
        "and output end with its other ids.",
        feature=_bad_words,
        example=((0,),),
        array="bad_words_list",
    ),
    Parameter(
        name="allowed_token_ids",
        kind=IdsKind(max_length=MAX_ALLOWED_IDS, json_min_length=1),
        neutral=(),
        step="4",
        doc="The only token ids that may be generated. Empty: all.",
        feature=_unless((), bit.ALLOWED),
        example=(0,),
    ),
    Parameter(
        name="no_repeat_ngram_size",
        kind=Integer(low=0, high=MAX_NGRAM),
        neutral=0,
        step="4",
        doc="Length of token sequences that may not occur twice in prompt and output. 0: no limit.",
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
        doc="Factor of top_p for each output token: it becomes `max(top_p_min, top_p * top_p_decay**age)`, "
        "where age is the number of output tokens since the start or since the last reset id (0 right "
        "after one).",
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
        doc="Lower limit of the decay of top_p.",
        # It limits only a decay.
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
        doc="Token ids after which the decay of top_p starts again.",
    ),
    Parameter(
        name="prompt_logprobs",
        kind=NUM_LOGPROBS,
        neutral=None,
        nullable=True,
        doc="Like `logprobs`, for the prompt's tokens from the second on. The prompt's KV is then computed, "
        "not taken from the cache.",
        bodies=("openai",),
    ),
    Parameter(
        name="return_context_logits",
        kind=Flag(),
        neutral=False,
        doc="Return the raw logits of each prompt position. The server must allow it.",
        bodies=("sglang",),
    ),
    Parameter(
        name="return_generation_logits",
        kind=Flag(),
        neutral=False,
        doc="Return the raw logits of each output position. The server must allow it.",
        feature=_unless(False, bit.LOGITS),
        example=True,
        bodies=("sglang",),
    ),
    Parameter(
        name="return_perf_metrics",
        kind=Flag(),
        neutral=False,
        doc="Return times and numbers of KV pages of each sequence with its end.",
        bodies=(),
    ),
    Parameter(
        name="prompt_logprobs_start",
        kind=NUM_TOKENS,
        neutral=0,
        doc="Position of the last prompt token without a logprob. Logprobs of the tokens before it are not "
        "computed, and their KV may come from the cache.",
        bodies=(),
    ),
    Parameter(
        name="truncate_prompt_tokens",
        kind=Integer(low=-1, high=MAX_TOKENS_LIMIT),
        neutral=None,
        nullable=True,
        doc="Number of the prompt's last tokens to keep. -1: as many as the context has room for beside "
        "`max_tokens`. None: a prompt that is too long is refused.",
    ),
    Parameter(
        name="top_n_sigma",
        kind=Number(low=0.0, high=1e6),
        neutral=0.0,
        step="7",
        doc="Largest distance of a kept id's logit below the largest logit, in standard deviations of the "
        "logits. 0 keeps all.",
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
        doc="Maximum number of guessed tokens in a step, if the server speculates. 0: none. None: the "
        "server's number. It does not change the output.",
    ),
    Parameter(
        name="additional_outputs",
        kind=TextsKind(max_length=MAX_OUTPUTS),
        neutral=(),
        doc="Names of additional outputs of the server, such as `hidden_states:12`, to return: one row for "
        "each output token except the last.",
        bodies=("sglang",),
    ),
    Parameter(
        name="gather_context",
        kind=Flag(),
        neutral=False,
        doc="Return rows of `additional_outputs` for each prompt token, too. The prompt's KV is then "
        "computed, not taken from the cache.",
        bodies=("sglang",),
    ),
    Parameter(
        name="use_beam_search",
        kind=Flag(),
        neutral=False,
        doc="Search for the most likely sequences with `beam_width` beams. The best `n` hypotheses are "
        "returned, best first.",
    ),
    Parameter(
        name="beam_width",
        kind=Integer(low=1, high=MAX_BEAMS),
        neutral=None,
        nullable=True,
        doc="Number of beams; without `use_beam_search` it has no effect. None: the largest of "
        "`beam_width_array`, or else `best_of`, or else `n`.",
    ),
    Parameter(
        name="length_penalty",
        kind=Number(low=-10.0, high=10.0),
        neutral=None,
        nullable=True,
        array="len_penalty",
        doc="Exponent of the length in a hypothesis's score, which is the sum of its logprobs divided by "
        "its length to this power; above 0 it favours long hypotheses. None: 1, unless the server's "
        "beam_defaults say 0.",
    ),
    Parameter(
        name="early_stopping",
        kind=Stopping(),
        neutral=None,
        nullable=True,
        array="early_stopping",
        doc="Rule by which a beam search stops once `beam_width` hypotheses have ended. true or 1: at once. "
        'false or 0: when the best beam has no better score at its length. Any other number or "never": '
        "when no beam can reach a better score. None: false, unless the server's beam_defaults say true.",
    ),
    Parameter(
        name="beam_search_diversity_rate",
        kind=Number(low=-100.0, high=100.0),
        neutral=0.0,
        array="beam_search_diversity_rate",
        doc="Bonus for candidates of lower beams: where candidates are compared, those of beam number i, "
        "counted from the best, get i times this added. Scores and logprobs do not include it.",
    ),
    Parameter(
        name="beam_width_array",
        kind=Counts(high=MAX_BEAMS, max_length=MAX_WIDTHS),
        neutral=(),
        doc="Number of beams after the first output token, after the second and so on; the last number "
        "holds from there on. `beam_width` must be its largest number, or None.",
    ),
)
