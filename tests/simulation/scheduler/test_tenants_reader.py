"""The scheduler's copy of the table of tenants: as new as the file, and never less than the last good one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runtime.ring.tenants import Tenant, TenantLimits, Tenants, TenantsFile
from scheduler_proc.loop import take_tenants
from tests.harness.scheduler.scheduler_parts import running


def table(max_running: int) -> Tenants:
    return Tenants((Tenant("a", "metrics", TenantLimits(max_running=max_running)),))


def test_a_new_table_is_in_force_at_once_and_a_bad_one_never(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TenantsFile(tmp_path / "tenants.json")
    with running() as system, caplog.at_level(logging.ERROR):
        reader = TenantsFile(tmp_path / "tenants.json")
        accounts = system.lifecycle.accounts
        for _ in range(3):
            take_tenants(reader.read_new(), system.lifecycle.room)
        assert len(caplog.records) == 1, "there is no file yet"
        assert accounts.tenants.named("a").role == "user"
        file.write(table(3))
        take_tenants(reader.read_new(), system.lifecycle.room)
        assert accounts.of("a").max_running == 3
        assert accounts.tenants.named("a").role == "metrics"
        file.write(table(5))
        take_tenants(reader.read_new(), system.lifecycle.room)
        assert accounts.of("a").max_running == 5
        (tmp_path / "tenants.json").write_text('[{"name": 3}]')
        for _ in range(3):
            take_tenants(reader.read_new(), system.lifecycle.room)
        assert len(caplog.records) == 2
        assert "the last one stays in force" in caplog.text
        assert accounts.of("a").max_running == 5
        file.write(Tenants())
        take_tenants(reader.read_new(), system.lifecycle.room)
        assert accounts.of("a").max_running == 5, "what a tenant without a section has here keeps its limits"
        file.write(table(2))
        (tmp_path / "tenants.json").unlink()
        take_tenants(reader.read_new(), system.lifecycle.room)
        assert len(caplog.records) == 3
