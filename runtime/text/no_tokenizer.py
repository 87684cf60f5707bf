"""NoTokenizer: replaces the tokenizer in a launch with skip_tokenizer_init. Ids pass through, the text of an
answer is empty, and requests that need text are refused by the name of the field. Imports none of the
tokenizer libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from runtime.base.errors import InvalidRequest


def needs_tokenizer(field: str) -> InvalidRequest:
    """Return the error for a field that needs a tokenizer."""
    return InvalidRequest(
        f"{field}: needs a tokenizer, and this server runs without one (--skip-tokenizer-init); "
        "it takes and gives token ids",
        param=field,
        code="no_tokenizer",
    )


class NoTokenizer:
    """Tokenizer of a launch without one: it refuses everything that a Tokenizer does."""

    @property
    def vocab_size(self) -> int:
        raise needs_tokenizer("tokens")

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> NoReturn:
        raise needs_tokenizer("prompt")

    def encode_end(self, text: str, num_last: int, *, add_special_tokens: bool = True) -> NoReturn:
        raise needs_tokenizer("prompt")

    @property
    def encodes_in_parts(self) -> bool:
        return False

    def max_token_chars(self) -> None:
        return None

    @property
    def is_template_open(self) -> bool:
        return True

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> NoReturn:
        raise needs_tokenizer("messages")

    @property
    def template_variables(self) -> frozenset[str]:
        return frozenset()

    @property
    def special_texts(self) -> frozenset[str]:
        return frozenset()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> NoReturn:
        raise needs_tokenizer("tokens")

    def token_strings(self, ids: Sequence[int]) -> NoReturn:
        raise needs_tokenizer("tokens")

    def token_bytes(self, token_id: int) -> None:
        return None


class NoTextDecoder:
    """Decoder for which every token has no text."""

    __slots__ = ()

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def fork(self) -> NoTextDecoder:
        """Return itself: it keeps nothing."""
        return self


class NoTextDecoders:
    def __init__(self) -> None:
        self._decoder = NoTextDecoder()

    def open(self, prompt_tail: Sequence[int], *, skip_special_tokens: bool = True) -> NoTextDecoder:
        return self._decoder

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the ids as vLLM spells tokens that are shown as ids: token_id:7 token_id:8."""
        return " ".join([f"token_id:{token_id}" for token_id in ids])
