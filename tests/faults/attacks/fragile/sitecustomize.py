"""Patch of tokenizer, detokenizer and grammar processes, for a launch that has this folder in PYTHONPATH:
they end by SIGSEGV at a certain text, in a guide that has it, or at the third token of a stream with a stop
string of its length, as a fault in a native library would end them.
"""

from __future__ import annotations

import sys
from typing import Any

POISON = "segmentation fault"


def _patch_tokenizer() -> None:
    import ctypes

    from runtime.text.tokenizer import Tokenizer

    encode_batch: Any = Tokenizer.encode_batch

    def fragile(self: Tokenizer, texts: Any, **options: Any) -> Any:
        if any(POISON in text for text in texts):
            ctypes.string_at(0)
        return encode_batch(self, texts, **options)

    Tokenizer.encode_batch = fragile  # type: ignore[method-assign]


def _patch_grammar() -> None:
    import ctypes

    from grammar_proc.matching.state_maker import StateMaker

    masks: Any = StateMaker.masks

    def fragile(self: StateMaker, entries: Any, until_s: float) -> Any:
        if any(POISON in entry.copy.grammar for entry in entries):
            ctypes.string_at(0)
        return masks(self, entries, until_s)

    StateMaker.masks = fragile  # type: ignore[method-assign]


def _patch_detokenizer() -> None:
    import ctypes

    from detokenizer_proc.text_stream import TextStream

    push: Any = TextStream.push

    def fragile(self: TextStream, token: int, packed: bytes) -> Any:
        strings = self._strings
        if strings is not None and strings._automaton.max_len == len(POISON) and self.num_tokens == 2:
            ctypes.string_at(0)
        return push(self, token, packed)

    TextStream.push = fragile  # type: ignore[method-assign]


if "detokenizer_proc.main" in sys.orig_argv:
    _patch_detokenizer()
if "tokenizer_proc.main" in sys.orig_argv:
    _patch_tokenizer()
if "grammar_proc.main" in sys.orig_argv:
    _patch_grammar()
