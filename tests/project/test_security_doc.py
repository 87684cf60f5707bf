"""docs/security.md: the tests that it names are there, and so is what it says of keys."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.ring.tenants import read_tenants
from runtime.settings.config import RuntimeConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text()
REFERENCE = re.compile(r"`(tests/[\w/.]+?)::(\w+)`")


def test_every_test_that_is_named_is_there() -> None:
    references = REFERENCE.findall(TEXT)
    assert len(references) > 40
    wrong = [
        f"{name}::{test}"
        for name, test in references
        if not (ROOT / name).is_file() or f"def {test}(" not in (ROOT / name).read_text()
    ]
    assert wrong == []


def test_every_threat_names_a_test() -> None:
    _, _, table = TEXT.partition("\n## Threats\n")
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    assert [row for row in rows if row.count(" | ") != 2 or not REFERENCE.search(row)] == []


def test_the_file_of_keys_that_is_shown_is_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "keys.toml"
    path.write_text(block)
    path.chmod(0o600)
    tenants = {tenant.name: tenant for tenant in read_tenants(RuntimeConfig(api_keys=str(path))).tenants}
    assert {name: tenant.role for name, tenant in tenants.items()} == {
        "alice": "user",
        "prometheus": "metrics",
        "operator": "admin",
    }
    assert len(tenants["operator"].digests) == 2


def test_the_policy_points_here() -> None:
    assert "(docs/security.md)" in (ROOT / "SECURITY.md").read_text()
    assert "(../SECURITY.md)" in TEXT
