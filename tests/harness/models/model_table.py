"""Tables of docs/models.md, made from the table of architectures and the registries of tests.

`python -m tests.harness.models.model_table` writes them into the file.
"""

from __future__ import annotations

from pathlib import Path

from runtime.checkpoint.architectures import ARCHITECTURES, TEXT_PARTS, Windowed
from tests.harness.models.model_registry import FAMILIES, MULTIMODAL, QUANTIZED, RANK_COUNTS
from tests.harness.models.transformers_registry import REFUSED, SERVED, SERVED_FROM

MODELS_DOC = Path(__file__).resolve().parents[3] / "docs" / "models.md"
BEGIN = "<!-- begin of the {} table: python -m tests.harness.models.model_table -->\n"
END = "<!-- end of the {} table -->\n"

_WINDOWS: dict[Windowed, str] = {
    "none": "none",
    "all": "every layer",
    "opted_in": "every layer, if `use_sliding_window`",
    "upper": "from `max_window_layers` on, if `use_sliding_window`",
    "interleaved": "all but every n-th layer",
}


def model_table() -> str:
    """One row per architecture, as Markdown."""
    lines = [
        "| models | `architectures` | computed by | window | soft-cap | experts | TP, tested with "
        "| quantised | compared as |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for architecture, row in ARCHITECTURES.items():
        family = FAMILIES[architecture]
        module = row.spec.partition(":")[0].rpartition(".")[2]
        cells = [
            family.models,
            f"`{architecture}`",
            f"native, `{module}.py`",
            _WINDOWS[row.windowed],
            "yes" if "attention_softcap" in row.keys else "no",
            "yes" if "num_experts" in row.keys else "no",
            ", ".join(map(str, RANK_COUNTS)),
            ", ".join(f"`{name}`" for name in QUANTIZED),
            ", ".join(f"`{name}`" for name in family.cases),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def text_table() -> str:
    """One row per multimodal architecture whose text part is served."""
    lines = ["| models | `architectures` | computed as | not loaded |", "| --- | --- | --- | --- |"]
    for architecture, part in TEXT_PARTS.items():
        towers = ", ".join(f"`{tower.rstrip('.')}`" for tower in part.towers)
        lines.append(f"| {MULTIMODAL[architecture]} | `{architecture}` | `{part.decoder}` | {towers} |")
    return "\n".join(lines) + "\n"


def served_table() -> str:
    """One row per architecture that has been compared over the transformers backend."""
    lines = [
        "| models | `architectures` | computed by |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {served.models} | `{name}` | transformers |" for name, served in SERVED.items()]
    return "\n".join(lines) + "\n"


def refused_table() -> str:
    """One row per config that the transformers backend is seen to refuse, with words of its error."""
    lines = ["| `model_type` | with | why not |", "| --- | --- | --- |"]
    for name, (recipe, reason) in REFUSED.items():
        detail = name.removeprefix(recipe.model_type).strip("_").replace("_", " ")
        later = f"; served from transformers {SERVED_FROM[name]} on" if name in SERVED_FROM else ""
        lines.append(f"| `{recipe.model_type}` | {detail} | {reason}{later} |")
    return "\n".join(lines) + "\n"


TABLES = {"native": model_table, "text": text_table, "transformers": served_table, "refused": refused_table}


def with_tables(text: str) -> str:
    """The document with the tables of today between their marks."""
    for name, table in TABLES.items():
        before, _, rest = text.partition(BEGIN.format(name))
        _, _, after = rest.partition(END.format(name))
        text = before + BEGIN.format(name) + table() + END.format(name) + after
    return text


if __name__ == "__main__":
    MODELS_DOC.write_text(with_tables(MODELS_DOC.read_text()))
