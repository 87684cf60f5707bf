"""The times at which a tokenizer believes that a request is made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.wire.status_page import ProcessStatus, StatusPage
from tokenizer_proc.recovery import RECOVERY_S, is_recovering

LATER_NS = round(RECOVERY_S * 1e9)


@pytest.mark.parametrize(("role", "index"), [("launcher", 0), ("detokenizer", 1)])
def test_it_does_for_a_while_after_a_restart_and_after_a_client_came_back(
    tmp_path: Path, role: str, index: int
) -> None:
    page = StatusPage(tmp_path / "status", create=True, counts={"detokenizer": 2})
    assert not is_recovering(page, LATER_NS)
    page.write(role, ProcessStatus(recovery_ns=5_000_000_000), index)
    assert is_recovering(page, 5_000_000_000)
    assert is_recovering(page, 4_000_000_000 + LATER_NS)
    assert not is_recovering(page, 5_000_000_000 + LATER_NS)
    page.close()
