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

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 1 << 24
MAX_TOP_K = 1 << 24
MAX_SEQUENCES = 128
MAX_WORDS = 64
MAX_WORD_IDS = 64
MAX_NGRAM = 64
SEEDS = 1 << 63
MAX_ALLOWED_IDS = 4096
BOOLEANS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "return_context_logits",
    "return_generation_logits",
    "return_perf_metrics",
)

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
WordIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_WORD_IDS)]


# What callers may write; the client library makes of them what the fields say.
Texts: TypeAlias = str | Sequence[str] | None
Ids: TypeAlias = Sequence[int] | None
Words: TypeAlias = Sequence[Sequence[int]] | None
Bias: TypeAlias = Mapping[int, float] | Mapping[str, float] | Sequence[Sequence[float]] | None
"""By token id, which JSON writes as text; or pairs of token id and bias."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """How to choose the next tokens and when to stop. Neutral values change nothing.

    Raises InvalidRequest from `validate()`; constructing one checks nothing, so that a caller sees every
    error in one place.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)] | None = 16
    """Of output, at most; None, and what is beyond the context: as many as the context has room for."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] = 0
    temperature: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K)] = -1
    """Keep the k most likely tokens; -1 or 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Seed of this request's noise; None lets the client library draw one. It takes all of 64 bits, signed or
    not: -1 is none, as in vLLM, and one that is not from 0 to 2**63 - 1 stands for its remainder by 2**63.
    """
    stop: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_STOP_CHARS)], ...], Meta(max_length=MAX_STOP_STRINGS)
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    """Go on past the model's own end tokens; the caller's stop_token_ids still stop."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Annotated[tuple[tuple[TokenId, float], ...], Meta(max_length=MAX_LOGIT_BIAS)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """None: no logprobs. k: the chosen token's and the k most likely ones'."""
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] = 1
    """Sequences to generate from the prompt; they share its KV."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    """Generate so many and keep the `n` with the highest cumulative logprob. The client library chooses: on
    the wire `n` is their number, and this is None.
    """
    stop_words_ids: Annotated[tuple[WordIds, ...], Meta(max_length=MAX_WORDS)] = ()
    """Each a sequence of token ids that ends the output, as a stop string does."""
    bad_words: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_STOP_CHARS)], ...], Meta(max_length=MAX_WORDS)
    ] = ()
    """Texts not to be generated: the tokenizer makes `bad_words_ids` of them, with and without a space."""
    bad_words_ids: Annotated[tuple[WordIds, ...], Meta(max_length=3 * MAX_WORDS)] = ()
    """Each a sequence of token ids whose last one is not generated after the others."""
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_ALLOWED_IDS)] = ()
    """Nothing else is generated. Empty: everything may be."""
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=MAX_NGRAM)] = 0
    """No sequence of so many tokens comes twice in prompt and output; 0: off."""
    top_p_decay: float = 1.0
    """Factor of top_p with each output token."""
    top_p_min: float = 0.0
    """What top_p does not decay below."""
    top_p_reset_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_WORD_IDS)] = ()
    """Token ids after which top_p begins again."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """As `logprobs`, of the prompt's tokens from the second on. Its KV is then computed, not taken from the
    cache.
    """
    return_context_logits: bool = False
    """Raw logits of each prompt position; the server must allow it."""
    return_generation_logits: bool = False
    """Raw logits of each output position; the server must allow it."""
    return_perf_metrics: bool = False
    """Times and KV pages of each sequence, with its end."""
    prompt_logprobs_start: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] = 0
    """Position in the prompt of the last token without a logprob; what is before it is not computed for
    logprobs, and may come from the cache.
    """
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS_LIMIT)] | None = None
    """Keep so many of the prompt's last tokens; -1: as many as the context leaves beside `max_tokens`. None:
    a prompt that is too long is refused.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
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
        ) -> None: ...

    def validate(self) -> None:
        """Check every range and combination that needs no model.
        Raises InvalidRequest naming the first field at fault.
        """
        self._check_counts()
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("top_p_decay", self.top_p_decay, 0.0, 1.0, open_low=True)
        _check_range("top_p_min", self.top_p_min, 0.0, 1.0)
        for name in BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false", param=name)
        self._check_texts("stop", MAX_STOP_STRINGS)
        self._check_texts("bad_words", MAX_WORDS)
        self._check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        self._check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
        self._check_ids("top_p_reset_ids", self.top_p_reset_ids, MAX_WORD_IDS)
        self._check_words("stop_words_ids", MAX_WORDS)
        self._check_words("bad_words_ids", 3 * MAX_WORDS)
        self._check_logit_bias()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids against the model. Raises InvalidRequest."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [i for i, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids),
            ("top_p_reset_ids", self.top_p_reset_ids),
            ("stop_words_ids", [i for word in self.stop_words_ids for i in word]),
            ("bad_words_ids", [i for word in self.bad_words_ids for i in word]),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token} is not below the vocabulary size {vocab_size}", param=name
                    )

    def check_truncation(self, context_length: int) -> None:
        """Check `truncate_prompt_tokens` against the model. Raises InvalidRequest."""
        wanted = self.truncate_prompt_tokens
        if wanted is not None and wanted > context_length:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {wanted}, the longest sequence is {context_length} tokens; "
                "-1 keeps as many as fit",
                param="truncate_prompt_tokens",
            )

    def num_kept(self, num_tokens: int, max_len: int, max_prompt_len: int | None = None) -> int:
        """Return how many of a prompt's last tokens `truncate_prompt_tokens` keeps.

        max_len: of the longest sequence. One token of it is the output's, whatever is asked for.
        max_prompt_len: of a prompt that is computed in one step; None: it may be computed in chunks.
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
        """What the request's sequence `number`, from 0, asks for when it is made alone."""
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
        )

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}",
                param="min_tokens",
            )
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        if self.seed is not None:
            _check_int("seed", self.seed, -SEEDS, 2 * SEEDS - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        _check_int("prompt_logprobs_start", self.prompt_logprobs_start, 0, MAX_TOKENS_LIMIT)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise InvalidRequest(
                "prompt_logprobs_start: without prompt_logprobs there are none to begin; set both",
                param="prompt_logprobs_start",
            )
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS_LIMIT)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequest(
                    "truncate_prompt_tokens is 0, which leaves no prompt; give a number to keep, or -1",
                    param="truncate_prompt_tokens",
                )
        _check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_NGRAM)
        _check_int("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, MAX_SEQUENCES)
            if self.best_of < self.n:
                raise InvalidRequest(
                    f"best_of is {self.best_of}, less than n, which is {self.n}", param="best_of"
                )

    def _check_texts(self, name: str, max_texts: int) -> None:
        texts = getattr(self, name)
        if len(texts) > max_texts:
            raise InvalidRequest(f"{name}: at most {max_texts} strings, got {len(texts)}", param=name)
        for text in texts:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"{name}: each must be a string of 1 to {MAX_STOP_CHARS} characters", param=name
                )

    def _check_ids(self, name: str, ids: tuple[int, ...], max_ids: int) -> None:
        if len(ids) > max_ids:
            raise InvalidRequest(f"{name}: at most {max_ids} token ids, got {len(ids)}", param=name)
        for token in ids:
            _check_int(name, token, 0, (1 << 31) - 1)

    def _check_words(self, name: str, max_words: int) -> None:
        words = getattr(self, name)
        if len(words) > max_words:
            raise InvalidRequest(f"{name}: at most {max_words} words, got {len(words)}", param=name)
        for word in words:
            if not word:
                raise InvalidRequest(f"{name}: a word needs at least one token id", param=name)
            self._check_ids(name, word, MAX_WORD_IDS)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias: at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
        seen: set[int] = set()
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, (1 << 31) - 1)
            _check_range("logit_bias", bias, -100.0, 100.0)
            if token in seen:
                raise InvalidRequest(f"logit_bias: token id {token} is given twice", param="logit_bias")
            seen.add(token)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {type(value).__name__}", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}", param=name)


def _check_range(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {type(value).__name__}", param=name)
    if not low <= value <= high or (open_low and value == low):  # also what is not a number
        bounds = f"above {low} and at most {high}" if open_low else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, got {value}", param=name)
