"""Choice of a launch's tokenizer: the one in a directory, or none."""

from __future__ import annotations

from pathlib import Path

from runtime.text.codec import Codec, Decoders
from runtime.text.no_tokenizer import NoTextDecoders, NoTokenizer

# The tokenizer libraries are imported when they are needed: they take a hundred megabytes.


def open_tokenizer(
    directory: str,
    chat_template: str = "",
    prepared: Path | None = None,
    *,
    allow_special_tokens: bool = False,
    has_tenants: bool = False,
) -> Codec:
    """Open the tokenizer of a resolved configuration. directory: empty for none. has_tenants: True if it
    encodes texts of several tenants, which must not learn of each other's. Other arguments: see
    runtime.text.tokenizer.load. Raises ModelError when a file is missing or cannot be read.
    """
    if not directory:
        return NoTokenizer()
    from runtime.text.tokenizer import load

    template = Path(chat_template) if chat_template else None
    tokenizer = load(
        Path(directory),
        chat_template=template,
        prepared=prepared,
        allow_special_tokens=allow_special_tokens,
    )
    if has_tenants:
        tokenizer.fill_word_cache()
    return tokenizer


def open_decoders(tokenizer: Codec) -> Decoders:
    """Return the decoders of a tokenizer from `open_tokenizer`."""
    if isinstance(tokenizer, NoTokenizer):
        return NoTextDecoders()
    from runtime.text.incremental import DecoderFactory
    from runtime.text.tokenizer import Tokenizer

    assert isinstance(tokenizer, Tokenizer)
    return DecoderFactory(tokenizer)
