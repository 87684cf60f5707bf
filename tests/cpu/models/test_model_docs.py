"""The documentation of models, the table of architectures and the registry of tests say the same."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.checkpoint.architectures import ARCHITECTURES, TEXT_PARTS
from tests.harness.models.model_registry import FAMILIES, MULTIMODAL
from tests.harness.models.model_table import MODELS_DOC, with_tables

ROOT = Path(__file__).resolve().parents[3]
MAY_NAME_FAMILIES = {"runtime/checkpoint/architectures.py"}


def test_every_architecture_is_compared_with_the_reference() -> None:
    assert ARCHITECTURES.keys() == FAMILIES.keys()
    for architecture, family in FAMILIES.items():
        assert family.cases, architecture
    assert TEXT_PARTS.keys() == MULTIMODAL.keys()


def test_the_tables_of_the_documentation_are_those_of_the_tests() -> None:
    text = MODELS_DOC.read_text()
    assert text == with_tables(text), "run python -m tests.harness.models.model_table"


def test_no_family_is_named_outside_its_spec_and_the_table() -> None:
    """Architectures and spec modules; words such as the name of a published method are not families."""
    modules = {row.spec.partition(":")[0] for row in ARCHITECTURES.values()}
    architectures = [*ARCHITECTURES, *TEXT_PARTS]
    names = [*architectures, *modules, *(name.removesuffix("ForCausalLM") for name in architectures)]
    pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    allowed = MAY_NAME_FAMILIES | {f"{module.replace('.', '/')}.py" for module in modules}
    wrong = []
    for folder in ("model_worker", "runtime", "scheduler_proc", "tokenizer_proc", "detokenizer_proc"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name not in allowed and (found := pattern.search(path.read_text())):
                wrong.append(f"{name}: {found.group()}")
    assert not wrong
