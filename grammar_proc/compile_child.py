"""Child of the grammar process that tries guides: `python -m grammar_proc.compile_child TOKENIZER`, the
directory of one.

Reads frames from stdin, each a length and a Guide, and writes a frame for each to stdout: a Compiled. It says
once, with an empty frame, that it is there. Whoever started it kills it when a guide takes too long.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from grammar_proc.guide_grammar import grammar_of, refused
from grammar_proc.vocabulary import GrammarVocabulary, reason_of
from runtime.base.errors import RequestError
from runtime.wire.error_info import error_info
from runtime.wire.format import Record
from runtime.wire.guide import Guide
from runtime.wire.messages import ErrorInfo

LENGTH = struct.Struct("<I")
MAX_MEMORY = 4 << 30
"""Address space; what a guide needs beyond that is a reason to refuse it."""


class Compiled(Record, frozen=True):
    """A grammar, or why there is none."""

    grammar: str = ""
    error: ErrorInfo | None = None


def try_guide(guide: Guide, vocabulary: GrammarVocabulary) -> Compiled:
    """Make a grammar of a guide and look whether any output matches it."""
    try:
        guide.validate()
        grammar = grammar_of(guide, vocabulary.special)
        matcher = vocabulary.compile(grammar)
        if not matcher.is_error():
            matcher = vocabulary.after_one(matcher)
        if matcher.is_error():
            raise refused(guide.kind, reason_of(matcher))
    except RequestError as error:
        return Compiled(error=error_info(error))
    except (ValueError, RecursionError, MemoryError) as error:
        return Compiled(error=error_info(refused(guide.kind, str(error) or type(error).__name__)))
    return Compiled(grammar)


def frame(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def main(vocabulary: GrammarVocabulary, source: BinaryIO, sink: BinaryIO) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    sink.write(frame(b""))
    while True:
        sink.flush()
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        guide = msgspec.msgpack.decode(source.read(*LENGTH.unpack(head)), type=Guide)
        sink.write(frame(msgspec.msgpack.encode(try_guide(guide, vocabulary))))


if __name__ == "__main__":
    # Anything that a library prints must not come between the frames.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    main(GrammarVocabulary(Path(sys.argv[1]), num_threads=1), sys.stdin.buffer, out)
