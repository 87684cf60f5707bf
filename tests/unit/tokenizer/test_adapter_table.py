"""Which adapter a request means, and which version of its files there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.base.errors import Forbidden, InvalidRequest
from runtime.ring.adapters_file import FIRST_ID, AdaptersFile
from runtime.wire.plan import AdapterRef
from tests.harness.adapters import write_adapter
from tokenizer_proc.adapters import AdapterTable
from tokenizer_proc.sequences import namespace

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "sql", SHAPES)
    return tmp_path / "sql"


def named(name: str, path: Path | str = "") -> AdapterRef:
    return AdapterRef(name, 7, "", str(path))


def test_a_request_without_one_has_none() -> None:
    assert AdapterTable().resolved(None, "") is None


def test_adapters_are_refused_where_none_are_served(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="--enable-lora") as caught:
        AdapterTable().resolved(named("sql", folder), "")
    assert (caught.value.code, caught.value.param) == ("lora_not_enabled", "lora_request")


def test_a_name_stands_for_the_launchs_directory(folder: Path) -> None:
    table = AdapterTable(AdaptersFile(None, {"other": "/none", "sql": str(folder)}), 64)
    ref = table.resolved(named("sql"), "a tenant")
    assert ref is not None
    assert (ref.name, ref.id, ref.path) == ("sql", FIRST_ID + 1, str(folder))
    assert len(ref.version) == 32
    with pytest.raises(InvalidRequest, match="there is no adapter 'sq'"):
        table.resolved(named("sq"), "")


def test_a_path_is_the_owners_to_name(folder: Path) -> None:
    table = AdapterTable(AdaptersFile(None, {}), 64)
    ref = table.resolved(named("mine", folder), "")
    assert ref is not None
    assert (ref.name, ref.id, ref.path) == ("mine", 7, str(folder))
    with pytest.raises(Forbidden, match="no paths"):
        table.resolved(named("mine", folder), "a tenant")


def test_what_cannot_be_served_is_refused_with_its_reason(folder: Path) -> None:
    table = AdapterTable(AdaptersFile(None, {}), 4)
    for path, reason in ((folder, "rank 8 is above"), (folder.parent / "none", "no such directory")):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            table.resolved(named("x", path), "")
        assert caught.value.code == "invalid_adapter"
        assert caught.value.param == "lora_request"
    with pytest.raises(InvalidRequest):
        table.resolved(named("x", "/nul\0byte"), "")


def test_other_files_are_another_version_with_a_cache_of_its_own(folder: Path) -> None:
    table = AdapterTable(AdaptersFile(None, {"sql": str(folder)}), 64)
    first = table.resolved(named("sql"), "")
    assert table.resolved(named("sql"), "") == first
    write_adapter(folder, SHAPES, seed=1)
    os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
    second = table.resolved(named("sql"), "")
    assert first is not None
    assert second is not None
    assert first.version != second.version
    assert (first.path, first.id) == (second.path, second.id)
    spaces = {namespace("", "", b"s", ref) for ref in (None, first, second)}
    spaces |= {namespace(*whose, b"s", first) for whose in (("t", ""), ("t", "x"), ("", "x"))}
    assert len(spaces) == 6
    assert b"" in spaces
    assert namespace("t", "", b"s", first)[:8] == namespace("t", "", b"s")
