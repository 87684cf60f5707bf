"""--model-spec: what it may name, and one clear error, before any process starts, for what it may not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import ConfigError
from runtime.checkpoint.architectures import ARCHITECTURES
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig, read_model_config
from tests.harness.cases import for_each

_OWN: dict[str, Any] = {
    "architectures": ["OwnForCausalLM"],
    "model_type": "own",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "own_eps": 1e-3,
    "auto_map": {"AutoModel": "own.Model"},
}
_IMPORT = "from model_worker.models.spec import ModelSpec"
_MODULE = f"""
{_IMPORT}
from runtime.checkpoint.architectures import Architecture

SPEC = ModelSpec(qkv_bias="always")
ROW = Architecture("own_models:SPEC", keys=dict(rms_norm_eps="own_eps"), defaults=dict(hidden_act="gelu"))
NUMBER = 7
NO_FIELD = ROW._replace(keys=dict(norm_epsilon="own_eps"))
UNREAD = ROW._replace(defaults=dict(hidden_activation="gelu", num_experts=3))
NO_WINDOW = ROW._replace(windowed="some")
NO_SPEC = ROW._replace(spec="own_models:NUMBER")
SPEC_OF_NOTHING = ROW._replace(spec="own_models:GONE")
SPEC_ITSELF = ROW._replace(spec=SPEC)
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of an architecture that nobody has, and modules of the user's."""
    (tmp_path / "config.json").write_text(json.dumps(_OWN))
    (tmp_path / "own_models.py").write_text(_MODULE)
    (tmp_path / "no_layout.py").write_text(f"{_IMPORT}\nX = ModelSpec(layout='odd')")
    (tmp_path / "no_library.py").write_text("import a_library_that_is_not_there")
    (tmp_path / "no_python.py").write_text("SPEC = (")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("own_models", "no_layout", "no_library", "no_python", "ends"):
        sys.modules.pop(name, None)


def test_a_spec_alone_reads_the_common_words(path: Path) -> None:
    config = read_model_config(path, "auto", model_spec="own_models:SPEC")
    assert isinstance(config, ModelConfig)
    assert (config.spec, config.architecture) == ("own_models:SPEC", "OwnForCausalLM")
    assert (config.norm_eps, config.hidden_act) == (1e-6, "silu")


def test_a_row_says_how_config_json_is_read(path: Path) -> None:
    config = ModelConfig.from_path(path, model_spec="own_models:ROW")
    assert (config.spec, config.norm_eps, config.hidden_act) == ("own_models:SPEC", 1e-3, "gelu")
    assert CheckpointConfig.read(path).vocab_size == config.vocab_size


def test_it_may_replace_the_spec_of_the_tree(path: Path) -> None:
    (name, row), *_ = ARCHITECTURES.items()
    (path / "config.json").write_text(json.dumps(_OWN | {"architectures": [name], "auto_map": None}))
    assert ModelConfig.from_path(path).spec == row.spec
    assert ModelConfig.from_path(path, model_spec="own_models:SPEC").spec == "own_models:SPEC"


@for_each(
    ("name", "says"),
    [
        ("own_models", "name your own as 'package.module:Name'"),
        ("gone_models:SPEC", "no module 'gone_models'"),
        ("own_models:GONE", "module 'own_models' has no 'GONE'"),
        ("own_models:", "has no ''"),
        (":SPEC", "fails while it is imported: ValueError: Empty module name"),
        ("own_models:NUMBER", "neither a ModelSpec nor an Architecture, but a int"),
        ("own_models:ModelSpec", "neither a ModelSpec nor an Architecture"),
        ("own_models:NO_FIELD", "keys has norm_epsilon; known: .*rms_norm_eps"),
        ("own_models:UNREAD", "defaults has hidden_activation, num_experts, which nothing reads"),
        ("own_models:NO_WINDOW", "windowed 'some' is unknown; known: none, all"),
        ("own_models:NO_SPEC", "its spec 'own_models:NUMBER' is of type int, not a ModelSpec"),
        ("own_models:SPEC_OF_NOTHING", "has no 'GONE'"),
        ("own_models:SPEC_ITSELF", "is not an import string"),
        ("no_layout:X", r"layout 'odd' is unknown; known: pre_norm.* \(no_layout.py, line 2"),
        ("no_library:X", "No module named 'a_library_that_is_not_there' .no_library.py, line 1"),
        ("no_python:SPEC", "SyntaxError: .*no_python.py, line 1"),
        ("ends:SPEC", "SystemExit: 3 .ends.py, line 1"),
    ],
)
def test_what_is_no_spec_is_one_clear_error(name: str, says: str, path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model_spec.*{says}"):
        read_model_config(path, "auto", model_spec=name)


def test_the_library_needs_none(path: Path) -> None:
    with pytest.raises(ConfigError, match="model_spec: with --model-impl transformers no spec"):
        read_model_config(path, "transformers", model_spec="own_models:SPEC")
