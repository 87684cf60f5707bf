"""The table of docs/models.md, made from the table of architectures and the registry of tests.

`python -m tests.model_table` writes it into the file.
"""

from __future__ import annotations

from pathlib import Path

from runtime.architectures import ARCHITECTURES, Windowed
from tests.model_registry import FAMILIES

MODELS_DOC = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN = "<!-- begin of the table: python -m tests.model_table -->\n"
END = "<!-- end of the table -->\n"

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
        "| models | `architectures` in config.json | spec | window | soft-cap | experts | compared as |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for architecture, row in ARCHITECTURES.items():
        family = FAMILIES[architecture]
        module = row.spec.partition(":")[0].rpartition(".")[2]
        cells = [
            family.models,
            f"`{architecture}`",
            f"`{module}.py`",
            _WINDOWS[row.windowed],
            "yes" if "attention_softcap" in row.keys else "no",
            "yes" if "num_experts" in row.keys else "no",
            ", ".join(f"`{name}`" for name in family.cases),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The document with the table of today between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + model_table() + END + after


if __name__ == "__main__":
    MODELS_DOC.write_text(with_table(MODELS_DOC.read_text()))
