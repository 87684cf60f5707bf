"""Pooling as the files of sentence-transformers say it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import InvalidRequest, ModelError
from runtime.checkpoint.pooling import Pooling, read_pooling
from tokenizer_proc.validation import check_task


def save(path: Path, modules: list[str], pooling: dict[str, Any] | None = None) -> Path:
    entries = [
        {"idx": n, "path": f"{n}_{name}", "type": f"x.models.{name}"} for n, name in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_without_files_the_last_token_counts(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling("last", normalize=True)
    assert read_pooling(tmp_path, "mean") == Pooling("mean", normalize=True)


@pytest.mark.parametrize(("mode", "kind"), [("lasttoken", "last"), ("mean_tokens", "mean")])
def test_the_files_say_which_tokens_count(tmp_path: Path, mode: str, kind: str) -> None:
    save(tmp_path, ["Transformer", "Pooling", "Normalize"], {f"pooling_mode_{mode}": True, "other": 1})
    assert read_pooling(tmp_path) == Pooling(kind, normalize=True)  # type: ignore[arg-type]


def test_no_normalize_module_leaves_the_length(tmp_path: Path) -> None:
    save(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True})
    assert read_pooling(tmp_path) == Pooling("mean", normalize=False)
    assert read_pooling(tmp_path, "last") == Pooling("last", normalize=False)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "Dense"),
        (["Transformer"], None, "--pooling"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "cls_token"),
        (["Transformer", "Pooling"], {}, "no pooling mode"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "max_tokens",
        ),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_lasttoken": True, "include_prompt": False},
            "include_prompt",
        ),
        (["Transformer", "Pooling"], None, "cannot be read"),
    ],
)
def test_what_is_not_served_is_refused(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any] | None, words: str
) -> None:
    save(tmp_path, modules, pooling)
    with pytest.raises(ModelError, match=words):
        read_pooling(tmp_path)


def test_a_server_serves_one_task() -> None:
    check_task("embed", "embed")
    check_task("generate", "generate")
    for asked, served in (("embed", "generate"), ("generate", "embed")):
        with pytest.raises(InvalidRequest, match="--task embed"):
            check_task(asked, served)  # type: ignore[arg-type]
