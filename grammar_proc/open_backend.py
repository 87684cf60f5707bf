"""Opening of the grammar backend that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grammar_proc.backend import BackendVocabulary
from runtime.base.registry import resolve

BACKENDS = {
    "llguidance": "grammar_proc.vocabulary:GrammarVocabulary",
    "xgrammar": "grammar_proc.xgrammar_backend.vocabulary:XGrammarVocabulary",  # imports torch
}


def open_vocabulary(backend: str, directory: Path, num_threads: int) -> BackendVocabulary[Any]:
    """Read the tokenizer of a directory for a backend: one of BACKENDS, or `module:Class`, which is called
    with the directory and the number of threads. Raises ModelError, ConfigError.
    """
    vocabulary: BackendVocabulary[Any] = resolve("grammar backend", backend, BACKENDS)(directory, num_threads)
    return vocabulary
