"""Weights that come with requests: pieces, directories, and what of them is refused."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from carousel.lora import LoraConfig, PackedWeights
from carousel.prompt_tables import PromptTuningConfig
from runtime.base.errors import AdapterNotResident, InvalidRequest, Overloaded
from runtime.checkpoint.adapters.lora_config import read_adapter
from runtime.ring.adapters_file import all_kept, incoming_in, read_kept
from runtime.ring.tenants import OWNER
from runtime.wire.plan import AdapterPiece
from tokenizer_proc.adapters import INCOMING_S, InlineAdapters

CONFIG = {"r": 2, "target_modules": ["q_proj"]}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
WEIGHTS = {f"{NAME}A.weight": np.ones((2, 8), np.float32), f"{NAME}B.weight": np.ones((8, 2), np.float32)}
CLIENT = 7


def packed(**changes: Any) -> PackedWeights:
    found = LoraConfig(1, WEIGHTS, {**CONFIG, **changes}).packed
    assert found is not None
    return found


@pytest.fixture
def inline(tmp_path: Path) -> InlineAdapters:
    return InlineAdapters(tmp_path, 16, 1 << 20)


def pieces(
    weights: PackedWeights, number: int = 1, size: int = 100, kind: Any = "lora"
) -> list[AdapterPiece]:
    whole = len(weights.weights)
    first = AdapterPiece(kind, number, weights.digest, whole, weights.config)
    return [first] + [
        AdapterPiece(kind, number, weights.digest, whole, offset=at, data=weights.weights[at : at + size])
        for at in range(0, whole, size)
    ]


def send(inline: InlineAdapters, several: list[AdapterPiece], tenant: str = OWNER) -> Any:
    answers = [inline.take(piece, CLIENT, tenant) for piece in several]
    assert all(isinstance(each, dict) and not each["is_resident"] for each in answers[:-1])
    return answers[-1]


def test_pieces_become_a_directory_of_the_tenant(inline: InlineAdapters, tmp_path: Path) -> None:
    weights = packed()
    placed = send(inline, pieces(weights))
    assert isinstance(placed, AdapterPiece)
    assert (placed.num_rows, placed.data, Path(placed.path)) == (2, b"", inline.path_of("lora", 1, OWNER))
    assert read_adapter(Path(placed.path), 16).rank == 2
    assert [path for path, _ in all_kept(tmp_path)] == [placed.path]
    assert inline.take(pieces(weights)[0], CLIENT, OWNER) == {"is_resident": True}
    with pytest.raises(AdapterNotResident):
        inline.path_of("lora", 1, "somebody")
    other = send(inline, pieces(packed(lora_alpha=3.0)), "somebody")
    assert other.path != placed.path
    version = read_adapter(Path(placed.path), 16).version
    again = InlineAdapters(tmp_path / "again", 16, 1 << 20)
    assert read_adapter(Path(send(again, pieces(weights)).path), 16).version == version


def test_a_piece_may_come_again_and_none_may_be_missing(inline: InlineAdapters) -> None:
    several = pieces(packed())
    inline.take(several[0], CLIENT, OWNER)
    assert inline.take(several[1], CLIENT, OWNER) == inline.take(several[1], CLIENT, OWNER)
    with pytest.raises(InvalidRequest, match="not in order"):
        inline.take(several[3], CLIENT, OWNER)
    for piece in several[2:-1]:
        inline.take(piece, CLIENT, OWNER)
    assert isinstance(inline.take(several[-1], CLIENT, OWNER), AdapterPiece)


def test_a_directory_of_this_machine_is_taken_as_it_is(inline: InlineAdapters, tmp_path: Path) -> None:
    weights = packed()
    folder = incoming_in(tmp_path) / "mine"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_bytes(weights.config)
    (folder / "adapter_model.safetensors").write_bytes(weights.weights)
    assert inline.take(pieces(weights, 3)[0], CLIENT, OWNER) == {"is_resident": False, "offset": 0}
    piece = AdapterPiece("lora", 3, weights.digest, len(weights.weights), folder="mine")
    placed = inline.take(piece, CLIENT, OWNER)
    assert isinstance(placed, AdapterPiece)
    assert not list(incoming_in(tmp_path).iterdir())
    kept = read_kept(Path(placed.path))
    assert kept is not None
    assert kept.digest == weights.digest


@pytest.mark.parametrize("folder", ["../kept", "..", ".", "a/b", "/tmp", "none"])
def test_a_directory_elsewhere_is_not_taken(inline: InlineAdapters, tmp_path: Path, folder: str) -> None:
    (incoming_in(tmp_path) / "a").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    with pytest.raises(InvalidRequest, match="no such directory"):
        inline.take(AdapterPiece("lora", 1, "0" * 64, 5, folder=folder), CLIENT, OWNER)
    assert (tmp_path / "kept").is_dir()


def test_what_is_too_large_or_no_adapter_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    weights = packed()
    small = InlineAdapters(tmp_path, 16, len(weights.weights) - 1)
    with pytest.raises(InvalidRequest, match="--lora-host-cache-size") as caught:
        small.take(pieces(weights)[0], CLIENT, OWNER)
    assert (caught.value.code, caught.value.param) == ("request_too_large", "lora_config")
    inline = InlineAdapters(tmp_path, 1, 1 << 20)
    for wrong, reason in (
        (packed(), "rank 2 is above"),
        (packed(r=3), "not of rank 3"),
        (packed(peft_type="PREFIX_TUNING"), "peft_type: 'PREFIX_TUNING'"),
        (weights._replace(weights=b"x" * 500), "cannot|header|safetensors"),
        (weights._replace(config=b"{"), "adapter_config.json cannot be read"),
    ):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            send(inline, pieces(wrong))
        assert str(tmp_path) not in caught.value.message
    several = pieces(weights)
    inline.take(several[0], CLIENT, OWNER)
    with pytest.raises(InvalidRequest, match="beyond the end"):
        inline.take(AdapterPiece("lora", 1, weights.digest, 10, data=b"y" * 20), CLIENT, OWNER)
    assert not list(all_kept(tmp_path))


def test_uploads_at_once_have_no_more_room_than_one(tmp_path: Path) -> None:
    weights = packed()
    inline = InlineAdapters(tmp_path, 16, 2 * len(weights.weights))
    for number in (1, 2):
        inline.take(pieces(weights, number)[0], CLIENT, OWNER)
    with pytest.raises(Overloaded, match="try again later"):
        inline.take(pieces(weights, 3)[0], CLIENT, OWNER)
    inline.take(pieces(weights, 1)[0], CLIENT, OWNER)
    send(inline, pieces(weights, 1))
    inline.take(pieces(weights, 3)[0], CLIENT, OWNER)


def test_uploads_of_one_tenant_give_way_to_those_of_another_within_its_part(tmp_path: Path) -> None:
    weights = packed()
    inline = InlineAdapters(tmp_path, 16, 4 * len(weights.weights))
    for number in range(1, 5):
        inline.take(pieces(weights, number)[0], CLIENT, "alice")
    for number in (1, 2):
        inline.take(pieces(weights, number)[0], CLIENT + 1, "bob")
    for tenant in ("alice", "bob"):
        with pytest.raises(Overloaded, match="try again later"):
            inline.take(pieces(weights, 5)[0], CLIENT, tenant)
    with pytest.raises(InvalidRequest, match="send them again"):
        send(inline, pieces(weights, 1)[1:], "alice")
    for tenant, number in (("alice", 4), ("bob", 1), ("bob", 2)):
        client = CLIENT + (tenant == "bob")
        placed = [inline.take(piece, client, tenant) for piece in pieces(weights, number)[1:]][-1]
        assert isinstance(placed, AdapterPiece)


def test_uploads_count_while_another_tokenizer_completes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is gone between two looks. Then none of the others counted."""
    weights = packed()
    inline = InlineAdapters(tmp_path, 16, 2 * len(weights.weights))
    for number in (1, 2):
        inline.take(pieces(weights, number)[0], CLIENT, OWNER)
    iterdir = Path.iterdir

    def with_one_that_is_gone(folder: Path) -> Iterator[Path]:
        yield folder / "owner-7-9-0-1"
        yield from iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", with_one_that_is_gone)
    with pytest.raises(Overloaded, match="try again later"):
        inline.take(pieces(weights, 3)[0], CLIENT, OWNER)


def test_uploads_are_only_so_many_however_small_their_weights_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a config, of up to a megabyte, and a directory."""
    monkeypatch.setattr("tokenizer_proc.adapters.MAX_UPLOADS", 32)
    inline = InlineAdapters(tmp_path, 16, 32 << 10)
    first = AdapterPiece("lora", 1, "0" * 64, 1, b"{}")
    for number in range(1, 33):
        inline.take(msgspec.structs.replace(first, task_id=number), CLIENT, "alice")
    with pytest.raises(Overloaded, match="try again later"):
        inline.take(msgspec.structs.replace(first, task_id=33), CLIENT, "alice")
    inline.take(first, CLIENT + 1, "bob")
    assert len(list(incoming_in(tmp_path).iterdir())) <= 32


def test_the_config_counts_as_a_part_of_what_is_kept(inline: InlineAdapters) -> None:
    weights = packed()
    kept = read_kept(Path(send(inline, pieces(weights)).path))
    assert kept is not None
    assert kept.num_bytes == len(weights.weights) + len(weights.config)


def test_an_upload_that_rests_is_given_up(inline: InlineAdapters, tmp_path: Path) -> None:
    inline.take(pieces(packed())[0], CLIENT, OWNER)
    (folder,) = incoming_in(tmp_path).iterdir()
    past = folder.stat().st_mtime - INCOMING_S - 1
    os.utime(folder, (past, past))
    inline.take(pieces(packed(lora_alpha=1.0), 2)[0], CLIENT, OWNER)
    assert not folder.exists()


def test_an_upload_that_takes_long_is_not_given_up_while_it_goes_on(
    inline: InlineAdapters, tmp_path: Path
) -> None:
    """A piece changes a file, which does not change the time of its directory."""
    first, piece, *others = pieces(packed())
    inline.take(first, CLIENT, OWNER)
    (folder,) = incoming_in(tmp_path).iterdir()
    past = folder.stat().st_mtime - INCOMING_S - 1
    os.utime(folder, (past, past))
    inline.take(piece, CLIENT, OWNER)
    inline.take(pieces(packed(lora_alpha=1.0), 2)[0], CLIENT, OWNER)
    assert isinstance(send(inline, others), AdapterPiece)


def test_vectors_of_a_prompt_are_kept_apart_from_weights(inline: InlineAdapters) -> None:
    table = PromptTuningConfig(np.ones((3, 8), np.float32))
    placed = send(inline, pieces(table.packed, table.number, kind="prompt"))
    assert (placed.num_rows, Path(placed.path)) == (0, inline.path_of("prompt", table.number, OWNER))
    with pytest.raises(InvalidRequest, match="peft_type: 'PROMPT_TUNING'"):
        send(inline, pieces(table.packed, 9))
    with pytest.raises(InvalidRequest, match="prompt_tuning_config: peft_type: 'LORA'"):
        send(inline, pieces(packed(), 9, kind="prompt"))


def named(*names: str, **config: Any) -> PackedWeights:
    """Weights of modules with these names."""
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": np.ones((1, 1), np.float32)
        for name in names
        for side in "AB"
    }
    found = LoraConfig(1, tensors, {"r": 1, **config}).packed
    assert found is not None
    return found


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(named("a" * 27, target_modules="(a+)+b"), id="a pattern that goes back and forth"),
        pytest.param(
            named(*map(str, range(2000)), target_modules=[f"m{number}" for number in range(20_000)]),
            id="names times modules",
        ),
        pytest.param(
            named("a", target_modules=["a"], alpha_pattern={f"m{number}?": 1.0 for number in range(9000)}),
            id="patterns to compile",
        ),
    ],
)
def test_what_takes_long_to_read_is_given_up(tmp_path: Path, weights: PackedWeights) -> None:
    """All that came from others waited for it: for a name of 40 letters until the tokenizer was killed."""
    inline = InlineAdapters(tmp_path, 16, 1 << 24)
    *first, last = pieces(weights, size=1 << 20)
    for piece in first:
        inline.take(piece, CLIENT, "alice")
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="too long to read") as caught:
        inline.take(last, CLIENT, "alice")
    assert time.thread_time() - began_s < 0.5
    assert caught.value.param == "lora_config"
    assert not list(incoming_in(tmp_path).iterdir())


def test_uploads_have_a_small_config_and_header(tmp_path: Path) -> None:
    inline = InlineAdapters(tmp_path, 16, 1 << 24)
    with pytest.raises(InvalidRequest, match="a config of 300"):
        send(inline, pieces(packed(peft_version="x" * 300_000)), "alice")
    many = named(*map(str, range(5000)), target_modules=["a"])
    with pytest.raises(InvalidRequest, match="a header of"):
        send(inline, pieces(many, size=1 << 20), "alice")
    assert not list(incoming_in(tmp_path).iterdir())
