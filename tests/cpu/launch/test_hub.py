"""Models by their name on the Hub: a function in its place, and the library itself without a network."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from runtime.base.errors import EXIT_NO_MODEL, ConfigError, ModelError
from runtime.checkpoint.hub import MODEL_FILES, TOKENIZER_FILES, is_hub_id, localize
from runtime.settings.config import RuntimeConfig

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Paths that the Hub was asked for."""
    calls: list[dict[str, Any]] = []

    def answer(repo_id: str, **arguments: Any) -> str:
        calls.append({"repo_id": repo_id, **arguments})
        return f"/cache/{repo_id}/snapshots/abc"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    return calls


@pytest.mark.parametrize("name", ["acme/tiny", "acme/Tiny-1.5B_chat", "0a/b.c"])
def test_owner_and_name_is_an_id(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize("name", ["", "tiny", "/m/tiny", "./tiny", "../a/b", "a/b/c", "~/tiny", "a/", "/"])
def test_anything_else_is_a_path(name: str) -> None:
    assert not is_hub_id(name)


def test_a_directory_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = RuntimeConfig(model="acme/tiny")
    assert localize(config) == config
    assert not asked


def test_a_model_is_served_under_its_name(asked: list[dict[str, Any]]) -> None:
    config = localize(RuntimeConfig(model="acme/tiny", revision="v2", tokenizer="acme/words"))
    assert config.model == "/cache/acme/tiny/snapshots/abc"
    assert config.tokenizer == "/cache/acme/words/snapshots/abc"
    assert config.served_model_name == "acme/tiny"
    assert [(call["repo_id"], call["revision"], call["allow_patterns"]) for call in asked] == [
        ("acme/words", None, TOKENIZER_FILES),
        ("acme/tiny", "v2", MODEL_FILES),
    ]
    assert localize(RuntimeConfig(model="acme/tiny", served_model_name="mine")).served_model_name == "mine"


def test_a_download_goes_where_it_is_told(asked: list[dict[str, Any]]) -> None:
    localize(RuntimeConfig(model="acme/tiny", tokenizer="acme/words", download_dir="/data"))
    localize(RuntimeConfig(model="acme/tiny"))
    assert [call["cache_dir"] for call in asked] == ["/data", "/data", None]
    with pytest.raises(ConfigError, match=r"^download_dir: .* leave it out"):
        localize(RuntimeConfig(model="/m/tiny", download_dir="/data"))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("chat_template.jinja", True),
        ("tokenizer.model", True),
        ("merges.txt", True),
        ("1_Pooling/config.json", True),
        ("pytorch_model.bin", False),
        ("modeling_own.py", False),
        ("consolidated.safetensors", False),
        ("onnx/config.json", False),
        ("original/params.json", False),
    ],
)
def test_neither_pickle_nor_code_is_downloaded(name: str, wanted: bool, asked: list[dict[str, Any]]) -> None:
    localize(RuntimeConfig(model="acme/tiny"))
    allowed = any(fnmatch.fnmatch(name, pattern) for pattern in asked[0]["allow_patterns"])
    ignored = any(fnmatch.fnmatch(name, pattern) for pattern in asked[0]["ignore_patterns"])
    assert (allowed and not ignored) is wanted


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError, "accept it on its page"),
        (RepositoryNotFoundError, "neither a directory here nor a model on the Hub"),
        (RevisionNotFoundError, "no revision 'v2'"),
        (ConnectionError, "hf download acme/tiny --local-dir DIR"),
    ],
)
def test_what_cannot_be_had_is_said_with_what_to_do(
    error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=words):
        localize(RuntimeConfig(model="acme/tiny", revision="v2"))


def test_a_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"revision: .* is not a model on the Hub"):
        localize(RuntimeConfig(model=str(tmp_path), revision="main"))


def _offline(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("HF_HUB_CACHE", None)
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_offline_a_model_comes_from_the_cache(tmp_path: Path) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--acme--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code = (
        "from runtime.settings.config import RuntimeConfig; from runtime.checkpoint.hub import localize\n"
        "print(localize(RuntimeConfig(model='acme/tiny')).model)"
    )
    done = _offline(["-c", code], tmp_path)
    assert done.stdout.strip() == str(snapshot), done.stderr


def test_offline_without_it_the_launch_says_what_to_do(tmp_path: Path) -> None:
    done = _offline([str(ROOT / "launch.py"), "--model", "acme/absent"], tmp_path)
    assert done.returncode == EXIT_NO_MODEL
    assert "acme/absent is not a directory here, not in the local cache" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
