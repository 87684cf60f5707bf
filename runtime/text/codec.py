"""Interfaces between text and ids: the parts of a tokenizer that other code uses. Imports none of the
tokenizer libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from runtime.base.errors import InvalidRequest
from runtime.wire.format import IntArray
from runtime.wire.transport import DECODE_ERRORS

PROMPT_TAIL_TOKENS = 8
"""Number of the prompt's last ids that a decoder of its output starts from."""
_decode_list = msgspec.json.Decoder(list[dict[str, Any]]).decode


def decode_tools(tools: bytes) -> list[dict[str, Any]]:
    """Return the tool definitions for a chat template; empty for none. Raises InvalidRequest."""
    if not tools:
        return []
    try:
        return _decode_list(tools)
    except DECODE_ERRORS as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"tools: no list of objects: {reason}", param="tools") from error


class PromptEncoder(Protocol):
    """Encodes prompts to ids. Raises InvalidRequest for a request that it cannot serve."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        """Return the ids of each text, int32, in order."""

    def encode_end(
        self, text: str, num_last: int, *, add_special_tokens: bool = True
    ) -> tuple[IntArray, int]:
        """Return the last num_last ids of a text, or all if there are fewer, int32, and the number of all."""

    @property
    def encodes_in_parts(self) -> bool:
        """True if a long text is encoded in parts, so that this takes little memory beside the text."""

    def max_token_chars(self) -> int | None:
        """Return the most characters of text that one token stands for; None if there is no bound. Slow: call
        once.
        """

    @property
    def is_template_open(self) -> bool:
        """True if a conversation takes no longer than its text. If False, the first conversation loads the
        template library, which takes half a second.
        """

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt of a conversation, special tokens included."""


class Codec(PromptEncoder, Protocol):
    """Encoder that can also decode, and knows single ids."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: one more than the highest id."""

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables that the chat template reads. The first call loads the template."""

    @property
    def special_texts(self) -> frozenset[str]:
        """Texts of the tokens that `skip_special_tokens` leaves out."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Ids that the tokenizer does not know have no text."""

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return each id's token as the vocabulary spells it."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of text that a token stands for; None if that cannot be told."""


class IncrementalDecoder(Protocol):
    """Decoder of one sequence, token by token."""

    def push(self, token: int) -> str:
        """Return the text that this token completes: often a word, sometimes nothing."""

    def flush(self) -> str:
        """Return the text that is held back at the end of the sequence: an incomplete character, as
        replacement characters.
        """


class ForkingDecoder(IncrementalDecoder, Protocol):
    def fork(self) -> ForkingDecoder:
        """Return an independent decoder that continues from here."""


class Decoders(Protocol):
    """Factory of decoders for one tokenizer."""

    def open(self, prompt_tail: Sequence[int], *, skip_special_tokens: bool = True) -> ForkingDecoder:
        """Make a decoder for what follows `prompt_tail`, the last few prompt ids, whose own text is not
        returned.
        """

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of these ids by themselves, special tokens included."""
