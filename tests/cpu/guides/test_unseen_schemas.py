"""Schemas that nobody made for this project: those of the official client's own types. All but a few are
taken, and no text that a guide allows is one that a validator rejects.

Those that hypothesis-jsonschema draws are taken, too. Deeper random schemas over all keywords are in
test_guided_output.py.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import openai.types
import pydantic
import pytest
from tokenizers import Tokenizer

from grammar_proc.compile_child import try_guide
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide

SEED = 24
MIN_TAKEN = 0.85
MIN_ENDED = 0.8
MIN_DRAWN_ENDED = 0.95
MAX_TOKENS = 600
CLOSING = ('"', "}", "]")
EAGER = 0.5
"""How often a text closes what it may close: without that it would hardly end."""


def schemas(share: int) -> list[str]:
    """Return those of one in so many classes of openai.types, without doubles."""
    classes = {}
    for info in pkgutil.walk_packages(openai.types.__path__, "openai.types."):
        for name, each in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if issubclass(each, pydantic.BaseModel) and each.__module__.startswith("openai.types"):
                classes[f"{each.__module__}.{name}"] = each
    chosen = [classes[name] for name in sorted(classes)[::share]]
    return list(dict.fromkeys(json.dumps(each.model_json_schema()) for each in chosen))


class Walk:
    """Texts that a guide allows, token by token."""

    def __init__(self) -> None:
        self.vocabulary = GrammarVocabulary(DEMO_MODEL, num_threads=1)
        self._tokenizer: Any = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        self._closing = {self._tokenizer.token_to_id(text) for text in CLOSING}
        self._rng = random.Random(SEED)

    def text(self, matcher: llguidance.LLMatcher) -> str | None:
        """Return one; None: it did not end."""
        ids: list[int] = []
        while len(ids) < MAX_TOKENS:
            (mask,) = self.vocabulary.masks([matcher])
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            if not allowed:
                assert matcher.is_accepting()
                text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
                return text
            closing = [token for token in allowed if token in self._closing]
            ids.append(self._rng.choice(closing if closing and self._rng.random() < EAGER else allowed))
            assert matcher.consume_token(ids[-1])
        return None


@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.full)])
def test_schemas_that_hypothesis_jsonschema_draws_are_kept(count: int) -> None:
    """All of those for which there is a value are taken."""
    pytest.importorskip("hypothesis_jsonschema", reason="not there before it was among the extra `test`")
    from tests.harness.guides.drawn_schemas import drawn_schemas

    walk, num_ended = Walk(), 0
    chosen = drawn_schemas(count, SEED)
    for schema in chosen:
        compiled = try_guide(Guide("json_schema", json.dumps(schema)), walk.vocabulary)
        assert compiled.error is None, (schema, compiled.error)
        text = walk.text(walk.vocabulary.compile(compiled.grammar))
        if text is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)
    print(
        f"{count} schemas, {len({json.dumps(each) for each in chosen})} of them different: {num_ended} ended"
    )
    assert num_ended >= MIN_DRAWN_ENDED * count


@pytest.mark.parametrize("share", [40, pytest.param(1, marks=pytest.mark.full)])
def test_schemas_of_the_official_clients_types_are_taken_and_kept(share: int) -> None:
    walk, chosen = Walk(), schemas(share)
    assert len(chosen) > 1000 // share
    num_taken = num_ended = 0
    for schema in chosen:
        compiled = try_guide(Guide("json_schema", schema), walk.vocabulary)
        if compiled.error is not None:
            continue
        num_taken += 1
        text = walk.text(walk.vocabulary.compile(compiled.grammar))
        if text is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text), json.loads(schema), cls=jsonschema.Draft202012Validator)
    print(f"{len(chosen)} schemas: {num_taken} taken, {num_ended} outputs ended")
    assert num_taken >= MIN_TAKEN * len(chosen)
    assert num_ended >= MIN_ENDED * num_taken
