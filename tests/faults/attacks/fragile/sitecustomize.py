"""Patch of tokenizer processes, for a launch that has this folder in PYTHONPATH: they end by SIGSEGV at a
certain text, as a fault in the tokenizers library would.
"""

from __future__ import annotations

import sys

POISON = "segmentation fault"

if "tokenizer_proc.main" in sys.orig_argv:
    import ctypes
    from collections.abc import Sequence

    from runtime.text.tokenizer import Tokenizer
    from runtime.wire.format import IntArray

    encode_batch = Tokenizer.encode_batch

    def fragile(self: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        if any(POISON in text for text in texts):
            ctypes.string_at(0)
        return encode_batch(self, texts, add_special_tokens=add_special_tokens)

    Tokenizer.encode_batch = fragile  # type: ignore[method-assign]
