"""Which checkpoints may take the place of the one that is served, and why others may not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.base.errors import ConfigError, InvalidRequest
from runtime.launcher.weights.checks import check_new_weights, with_weight_updates
from runtime.settings.config import RuntimeConfig
from tests.harness.cases import for_each
from tests.harness.models.checkpoint_files import save_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> RuntimeConfig:
    """A launch that serves "old", with "new" beside it."""
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    old = save_checkpoint(allowed / "old")
    save_checkpoint(allowed / "new")
    return RuntimeConfig(
        model=str(old), tokenizer=str(old), model_impl="native", dtype="float32", weights_dir=str(allowed)
    )


def new_of(config: RuntimeConfig) -> Path:
    return Path(config.weights_dir) / "new"


def refusal(config: RuntimeConfig, asked: str = "new") -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_new_weights(config, asked)
    assert caught.value.param == "model_path"
    return caught.value


def write_tensors(path: Path, **tensors: tuple[str, list[int]]) -> None:
    """Write a weight file without values, as (dtype, shape)."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2, "I8": 1}[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(end))


def change_json(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@for_each("asked", ["new", "./new", "old/../new"])
def test_a_checkpoint_of_the_same_model_is_taken(config: RuntimeConfig, asked: str) -> None:
    assert check_new_weights(config, asked) == str(new_of(config))
    assert check_new_weights(config, str(new_of(config))) == str(new_of(config))


def test_what_changes_nothing_may_differ(config: RuntimeConfig) -> None:
    """Trainers write no tokenizer, their own version, and another dtype, which is converted."""
    path = new_of(config)
    (path / "tokenizer.json").unlink()
    change_json(path / "config.json", transformers_version="99.0", torch_dtype="bfloat16", _name_or_path="x")
    write_tensors(path, **{"model.norm.weight": ("BF16", [16])})
    assert check_new_weights(config, "new") == str(path)


def test_other_sampling_defaults_are_refused_where_requests_have_them(config: RuntimeConfig) -> None:
    """HTTP processes that were started before and after a change gave requests different ones."""
    change_json(new_of(config) / "generation_config.json", temperature=0.3)
    assert "temperature is 0.3" in refusal(config).message
    assert check_new_weights(msgspec.structs.replace(config, sampling_defaults="openai"), "new")


@pytest.mark.parametrize(
    ("file", "key", "value", "named"),
    [
        ("config.json", "num_hidden_layers", 7, "num_"),
        ("config.json", "vocab_size", 99, "vocab_size"),
        ("config.json", "rms_norm_eps", 0.5, "norm_eps"),
        ("generation_config.json", "eos_token_id", 77, "eos_token_ids"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    config: RuntimeConfig, file: str, key: str, value: object, named: str
) -> None:
    change_json(new_of(config) / file, **{key: value})
    for impl in ("native", "transformers"):
        error = refusal(msgspec.structs.replace(config, model_impl=impl))
        assert (error.code, named in error.message) == ("invalid_weights", True), (impl, error)


@for_each(
    ("tensors", "said"),
    [
        ({}, "lacks tensors: model.norm.weight"),
        ({"model.norm.weight": ("F32", [16]), "more": ("F32", [1])}, "other tensors .*: more"),
        ({"model.norm.weight": ("F32", [17])}, r"shape \[17\]"),
        ({"model.norm.weight": ("I8", [16])}, "is I8"),
    ],
)
def test_other_tensors_are_refused_by_name(
    config: RuntimeConfig, tensors: dict[str, tuple[str, list[int]]], said: str
) -> None:
    write_tensors(new_of(config), **tensors)
    with pytest.raises(InvalidRequest, match=said):
        check_new_weights(config, "new")


def test_quantised_tensors_keep_their_types(config: RuntimeConfig) -> None:
    kinds: dict[str, tuple[str, list[int]]] = {"layer": ("I8", [4]), "scale": ("F32", [4])}
    write_tensors(Path(config.model), **kinds)
    write_tensors(new_of(config), **kinds)
    assert check_new_weights(config, "new")
    write_tensors(new_of(config), **(kinds | {"scale": ("BF16", [4])}))
    assert "scale is BF16" in refusal(config).message


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def no_json(path: Path) -> None:
    (path / "config.json").write_text("{")


def other_tokenizer(path: Path) -> None:
    with (path / "tokenizer.json").open("a") as file:
        file.write("\n")


def no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (cut, "cut short"),
        (no_json, "cannot be read"),
        (no_weights, "no [*].safetensors file"),
        (other_tokenizer, "tokenizer.json is not that of the launch"),
        (shutil.rmtree, "there is no directory"),
    ],
)
def test_files_that_cannot_serve_are_named(
    config: RuntimeConfig, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(new_of(config))
    with pytest.raises(InvalidRequest, match=said):
        check_new_weights(config, "new")


def test_weights_that_are_served_are_not_replaced_by_themselves(config: RuntimeConfig) -> None:
    (Path(config.weights_dir) / "link").symlink_to("old")
    for asked in ("old", "link", config.model):
        assert refusal(config, asked).code == "weights_are_served"


def test_a_path_leads_nowhere_else(config: RuntimeConfig, tmp_path: Path) -> None:
    for name in ("outside", "allowed-2"):
        save_checkpoint(tmp_path / name)
    (Path(config.weights_dir) / "link").symlink_to(tmp_path / "outside")
    for asked in ("..", ".", "", "/", "../outside", "../allowed-2", "link", "/etc"):
        assert refusal(config, asked).message == "model_path: it leads out of --weights-dir", asked
    assert refusal(config, "a\0b").message == "model_path: it is no path"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_leads_nowhere_else(config: RuntimeConfig, tmp_path: Path, name: str) -> None:
    outside = save_checkpoint(tmp_path / "outside")
    (new_of(config) / name).unlink()
    (new_of(config) / name).symlink_to(outside / name)
    assert refusal(config).message == "model_path: a file of it leads out of --weights-dir"


def write_pooling(path: Path, folder: Path, module: str) -> None:
    """Write files of a pooling of the last token: those of `module` are in `folder`."""
    modules = [{"type": "sentence_transformers.models.Pooling", "path": module}]
    (path / "modules.json").write_text(json.dumps(modules))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))


def test_the_same_pooling_is_taken(config: RuntimeConfig) -> None:
    for path in (Path(config.model), new_of(config)):
        write_pooling(path, path / "1_Pooling", "1_Pooling")
    assert check_new_weights(msgspec.structs.replace(config, task="embed"), "new")


@pytest.mark.parametrize("module", ["1_Pooling", "../../outside"])
def test_the_file_of_a_pooling_leads_nowhere_else(config: RuntimeConfig, tmp_path: Path, module: str) -> None:
    write_pooling(new_of(config), tmp_path / "outside", module)
    (new_of(config) / "1_Pooling").symlink_to(tmp_path / "outside")
    embeds = msgspec.structs.replace(config, task="embed")
    assert refusal(embeds).message == "model_path: a file of it leads out of --weights-dir"


@for_each(
    ("settings", "named"),
    [
        ({"restart": "never"}, "restart"),
        ({"load_format": "dummy"}, "load_format"),
        ({"nnodes": 2}, "nnodes"),
        ({"weights_dir": "/no/such/place"}, "no directory"),
    ],
)
def test_settings_under_which_nothing_can_be_replaced(
    config: RuntimeConfig, settings: dict[str, Any], named: str
) -> None:
    assert with_weight_updates(config).weights_dir == config.weights_dir
    assert with_weight_updates(RuntimeConfig(restart="never")).weights_dir == ""
    with pytest.raises(ConfigError, match=f"weights_dir: .*{named}"):
        with_weight_updates(msgspec.structs.replace(config, **settings))
