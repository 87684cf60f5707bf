"""Open the grammar backend that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grammar_proc.backend import BackendVocabulary
from grammar_proc.vocabulary import GrammarVocabulary


def open_vocabulary(backend: str, directory: Path, num_threads: int) -> BackendVocabulary[Any]:
    """Read the tokenizer of a directory for a backend. Raises ModelError."""
    if backend == "xgrammar":
        from grammar_proc.xgrammar_backend.vocabulary import XGrammarVocabulary  # imports torch

        return XGrammarVocabulary(directory, num_threads)
    return GrammarVocabulary(directory, num_threads)
