"""Mistakes of a first hour: each is one line and the right exit code, before any process is started.

Here the launcher's main runs up to the place where it would start them. What only a whole launch shows (a
port in use, an address of elsewhere, a run directory) is in tests/cpu/launch/test_launch.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.checkpoint.weight_files import INDEX_FILE
from runtime.launcher import main as launcher
from runtime.launcher.checks import device, implementations
from runtime.settings.config import RuntimeConfig
from tests.harness.cases import for_each
from tests.harness.models.checkpoint_files import LFS_POINTER, safetensors_file, save_checkpoint
from tests.harness.sources import ROOT

STARTED = -1
NO_MODEL, BAD_SETTINGS, TAKEN = 72, 64, 69
NOBODY = 65534
Change = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model")


@pytest.fixture(autouse=True)
def stops_before_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a launch; and what main does to the process it runs in."""

    class Reached:
        def __init__(self, config: RuntimeConfig) -> None:
            pass

        def run(self) -> int:
            return STARTED

    monkeypatch.setattr(launcher, "Supervisor", Reached)
    monkeypatch.setattr(launcher, "hold_standard_streams", lambda: None)
    monkeypatch.setattr(launcher, "end_by_signal", lambda: None)
    monkeypatch.setattr(launcher, "choose_cpu_isa", lambda isa: None)
    monkeypatch.setattr(launcher, "set_title", lambda role: None)
    monkeypatch.setattr(launcher, "configure_logging", lambda role, level, log_format: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refuses(capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str) -> None:
    assert launcher.main(["--device=cpu", *arguments]) == code
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert says in said[0]


@for_each(
    ("arguments", "says"),
    [
        ("--max-model-length 100", "--max-model-length"),
        ("--foo", "--foo"),
        ("--max-num-seqs many", "--max-num-seqs"),
        ("--max-num-seqs -1", "max_running_requests: expected int >= 1"),
        ("--port 70000", "port: expected int <= 65535"),
        ("--max-beam-width 0", "max_beam_width: expected int >= 1"),
        ("--max-beam-width 9 --max-num-seqs 8", "max_beam_width: 9 beams take as many rows"),
        (
            "--max-beam-width 2 --beam-batching drain --schedule-policy lpm",
            "schedule_policy: with --beam-batching drain",
        ),
        ("--max-beam-width 2 --task embed", "max_beam_width: an embedding model searches nothing"),
        ("--attention-backend nonsense", "attention_backend: --attention-backend 'nonsense' is unknown"),
        ("--attention-backend triton", "attention_backend: triton cannot be used: the device is cpu"),
        ("--attention-backend flashinfer", "flashinfer cannot be used: the device is cpu"),
        ("--tp-size 3", "tp_size: 3 ranks cannot share"),
        ("--tp-size 2 --model-impl transformers", "tp_size: --model-impl transformers"),
        ("--dtype int4", "--dtype"),
        ("--cpu-isa avx3", "--cpu-isa"),
        ("--quantization gguf", "--quantization"),
        ("--load-format pickle", "--load-format"),
        ("--kv-cache-dtype fp8_e4m3", "kv_cache_dtype: fp8_e4m3 is for CUDA"),
        ("--context-length 100000", "context_length: 100000 is more than the model's own 2048"),
        ("--mem-fraction-static 2", "mem_fraction_static: expected float < 1.0"),
        ("--max-total-tokens 10", "max_total_tokens: 10 is less than a page of 16"),
        ("--chat-template /nonexistent.jinja", "chat_template: there is no file /nonexistent.jinja"),
        ("--tokenizer /nonexistent", "tokenizer: there is no directory /nonexistent"),
        ("--revision main", "revision: "),
        ("--no-http --default-max-tokens 5", "default_max_tokens: with no_http"),
        ("--default-max-tokens -5", "default_max_tokens: expected int >= 0"),
        ("--profile-dir /nonexistent", "profile_dir: /nonexistent"),
        ("--cuda-graph-max-bs 8", "cuda_graph_max_bs: the device is a CPU"),
    ],
)
def test_a_wrong_setting(arguments: str, says: str, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refuses(capfd, [f"--model={model}", *arguments.split()], BAD_SETTINGS, says)


@for_each(
    ("arguments", "code", "says"),
    [
        (
            "--schedule-policy fastest",
            BAD_SETTINGS,
            "schedule_policy: --schedule-policy 'fastest' is unknown",
        ),
        ("--chat-template /nonexistent.jinja", BAD_SETTINGS, "chat_template: there is no file"),
        ("--api-keys /nonexistent.toml", BAD_SETTINGS, "api_keys: /nonexistent.toml cannot be read"),
        ("--ssl-certfile /nonexistent.pem", BAD_SETTINGS, "ssl_certfile: /nonexistent.pem cannot be read"),
        ("--lora-modules a=/nonexistent", BAD_SETTINGS, "lora_modules: "),
        ("--attention-backend triton", BAD_SETTINGS, "attention_backend: triton cannot be used"),
        ("--max-beam-width 9 --max-num-seqs 8", BAD_SETTINGS, "max_beam_width: 9 beams"),
        ("--metrics-open", BAD_SETTINGS, "metrics_open: without an API key"),
        ("--host 192.0.2.1", BAD_SETTINGS, "host: 192.0.2.1 is no address of this machine"),
        ("--port {taken}", TAKEN, "port: cannot listen on 127.0.0.1:"),
    ],
)
def test_a_mistake_is_known_before_a_model_is_downloaded(
    arguments: str, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CAROUSEL_API_KEY", raising=False)
    asked: list[RuntimeConfig] = []
    monkeypatch.setattr(launcher, "localize", asked.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = arguments.format(taken=taken.getsockname()[1]).split()
        refuses(capfd, ["--model=acme/tiny", *words], code, says)
    assert not asked


def test_what_a_launch_without_mistakes_asks_the_hub_for(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """Whatever a model could make right is not refused before there is one."""
    monkeypatch.setenv("CAROUSEL_API_KEY", "k")
    asked = []

    def localize(config: RuntimeConfig) -> RuntimeConfig:
        asked.append(config.model)
        return msgspec.structs.replace(config, model=str(model), tokenizer="")

    monkeypatch.setattr(launcher, "localize", localize)
    words = "--port=0 --metrics-open --tokenizer=acme/words --enable-dynamic-chunking --device=cpu"
    assert launcher.main(["--model=acme/tiny", *words.split()]) == STARTED
    assert asked == ["acme/tiny"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hf-overrides", '{"max_position_embeddings": 5000000}'], "by its --hf-overrides or"),
        (["--rope-scaling", '{"rope_type": "linear", "factor": 1e5}'], "has 204800000 positions by its --hf"),
        (
            [],
            "context_length: the model has 5000000 positions by its config.json; served are 4194304 at most",
        ),
    ],
)
def test_a_context_that_no_process_takes(
    arguments: list[str], says: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if not arguments:
        _config(max_position_embeddings=5_000_000)(model)
    refuses(capfd, [f"--model={model}", *arguments], BAD_SETTINGS, says)
    shorter = [f"--model={model}", "--device=cpu", "--context-length=4194304", *arguments]
    assert launcher.main(shorter) == STARTED


@for_each(
    ("name", "says"),
    [
        ("nowhere", "nowhere does not exist. Pass the path of a local checkpoint, or owner/name"),
        ("https://huggingface.co/org/name", "is a URL: pass the path of a local checkpoint, or owner/name"),
        ("https://huggingface.co/org/name/tree/main", "--model org/name is that model"),
        ("http://example.org/x.gguf", "http://example.org/x.gguf is a URL"),
        ("empty", "empty has no config.json, so it is not a checkpoint directory: it is empty"),
        ("model/config.json", "config.json is a file: pass the directory"),
        ("some.gguf", "some.gguf is a file: pass the directory of the checkpoint; GGUF files are not read"),
        ("adapter", "it holds an adapter (LoRA). Pass the model itself"),
        ("ggufs", "no config.json, so it is not a checkpoint directory: it holds GGUF files"),
        ("models--a--b", "Pass one of"),
        (".", "model has one: pass that"),
        ("Qwen/Qwen 3", "Qwen/Qwen 3 does not exist"),
        ("~no-such-user/model", "~no-such-user/model does not exist"),
        ("b" * 300, "cannot be opened: File name too long"),
    ],
)
def test_a_wrong_path(
    name: str, says: str, model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    for path in ("empty", "adapter", "ggufs", "models--a--b/snapshots"):
        Path(path).mkdir(parents=True, exist_ok=True)
    for path in ("some.gguf", "adapter/adapter_config.json", "ggufs/x.gguf"):
        Path(path).touch()
    refuses(capfd, [f"--model={name}"], NO_MODEL, says)


@contextmanager
def as_nobody(mode: int) -> Iterator[Path]:
    """A checkpoint whose directory has this mode, while this process is a user like any other."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # nobody may look into the folders of a test that root runs
        model = save_checkpoint(Path(folder) / "model")
        model.chmod(mode)
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(model, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield model
        finally:
            if is_root:
                os.seteuid(0)
            model.chmod(0o700)


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100], ids=oct)
def test_a_path_without_permission(mode: int, capfd: pytest.CaptureFixture[str]) -> None:
    with as_nobody(mode) as model:
        says = f"Model directory {model} cannot be opened: Permission denied"
        refuses(capfd, [f"--model={model}"], NO_MODEL, says)
        inside = [f"--model={model}/inside"]
        refuses(capfd, inside, NO_MODEL, "cannot be opened" if mode != 0o100 else "does not exist")


def test_a_template_without_permission(capfd: pytest.CaptureFixture[str]) -> None:
    with as_nobody(0o000) as locked:
        arguments = [f"--chat-template={locked}/chat_template.jinja", "--device=cpu"]
        refuses(capfd, arguments, BAD_SETTINGS, "chat_template: there is no file")


def _config(**changes: Any) -> Change:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return change


def _file(name: str, content: bytes | str) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda model: (model / name).write_bytes(data)


def _renamed(old: str, new: str) -> Change:
    return lambda model: (model / old).rename(model / new)


def _template_in_config(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "default", "template": "{{ messages"}]}
    (model / "tokenizer_config.json").write_text(json.dumps(config))


WEIGHTS = "model.safetensors"
WHOLE = safetensors_file()
WRONG_FILES: dict[str, tuple[Change, str]] = {
    "config is no JSON": (_file("config.json", "{"), "config.json cannot be read: "),
    "config is a pointer": (_file("config.json", LFS_POINTER), "config.json is a git-lfs pointer"),
    "code of its own": (_config(auto_map={"AutoModel": "x.Y"}), "auto_map"),
    "images": (_config(architectures=["LlavaForConditionalGeneration"]), "is not a decoder of text"),
    "dtype": (_config(dtype="int4"), "dtype 'int4' is not supported"),
    "only .bin": (_renamed(WEIGHTS, "pytorch_model.bin"), "only PyTorch's pickle files (.bin)"),
    "no weights": (lambda model: (model / WEIGHTS).unlink(), "has no *.safetensors file. Other formats"),
    "missing shard": (
        _file(
            INDEX_FILE,
            '{"weight_map": {"a": "model.safetensors", "b": "model-00001-of-00002.safetensors"}}',
        ),
        "lacks files that its index names: model-00001-of-00002.safetensors. Download the rest",
    ),
    "index is no JSON": (_file(INDEX_FILE, "<html>"), f"{INDEX_FILE} cannot be read: "),
    "index is a pointer": (_file(INDEX_FILE, LFS_POINTER), f"{INDEX_FILE} is a git-lfs pointer"),
    "index leads out": (_file(INDEX_FILE, '{"weight_map": {"a": "../b"}}'), "outside the model directory"),
    "truncated": (_file(WEIGHTS, WHOLE[:-10]), f"{WEIGHTS} is cut short: it has {len(WHOLE) - 10} of"),
    "truncated in its header": (_file(WEIGHTS, WHOLE[:20]), f"{WEIGHTS} is cut short: it has 20 bytes"),
    "empty weights": (_file(WEIGHTS, b""), f"{WEIGHTS} is cut short: it has 0 bytes"),
    "too long": (_file(WEIGHTS, WHOLE + b"x"), f"{WEIGHTS} is longer than its header says"),
    "a web page": (_file(WEIGHTS, "<!DOCTYPE html><html>" * 9), f"{WEIGHTS} is no safetensors file"),
    "another header": (
        _file(WEIGHTS, b"\4" + bytes(7) + b"abcd"),
        f"{WEIGHTS} has a header that cannot be read",
    ),
    "weights are a pointer": (_file(WEIGHTS, LFS_POINTER), f"{WEIGHTS} is a git-lfs pointer"),
    "no tokenizer": (
        lambda model: (model / "tokenizer.json").unlink(),
        "has no tokenizer.json. Convert the model's tokenizer",
    ),
    "sentencepiece": (
        _renamed("tokenizer.json", "tokenizer.model"),
        "has no tokenizer.json, only tokenizer.model",
    ),
    "tokenizer is no JSON": (_file("tokenizer.json", '{"model": '), "tokenizer.json cannot be read: "),
    "tokenizer is empty": (
        _file("tokenizer.json", "{}"),
        "tokenizer.json is not the file of a tokenizer: it has no added_tokens and no model. Download it",
    ),
    "tokenizer is another file": (_file("tokenizer.json", '{"model": {}}'), "it has no added_tokens. "),
    "tokenizer is a pointer": (_file("tokenizer.json", LFS_POINTER), "tokenizer.json is a git-lfs pointer"),
    "template is a pointer": (_file("chat_template.jinja", LFS_POINTER), ".jinja is a git-lfs pointer"),
    "template's block": (
        _file("chat_template.jinja", "a\n{% if x %}"),
        "does not compile: line 2: Unexpected end of template",
    ),
    "template in tokenizer_config.json": (_template_in_config, "name another with --chat-template"),
    "generation_config is no JSON": (
        _file("generation_config.json", "[]"),
        "generation_config.json cannot be read",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_FILES)
def test_a_wrong_file(mistake: str, model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, says = WRONG_FILES[mistake]
    change(model)
    refuses(capfd, [f"--model={model}"], NO_MODEL, says)


@for_each(
    ("template", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }", "line 2: unexpected '}'"),
        ("{{ messages | no_such_filter }}", "line 1: No filter named 'no_such_filter'"),
        ("{% frobnicate %}", "Encountered unknown tag 'frobnicate'"),
    ],
)
def test_a_template_that_does_not_compile(
    template: str, says: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = model.parent / "own.jinja"
    path.write_text(template)
    refuses(capfd, [f"--model={model}", f"--chat-template={path}"], BAD_SETTINGS, says)


@pytest.mark.parametrize(
    ("arguments", "warns"), [([], True), (["--api-key=mine"], False), (["--no-http"], False)]
)
def test_a_key_for_vllm_is_not_taken_for_one(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    warns: bool,
) -> None:
    """Whoever comes from there would have an open server otherwise, and not know it."""
    monkeypatch.delenv("CAROUSEL_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert launcher.main([f"--model={model}", "--device=cpu", *arguments]) == STARTED
    assert ("set CAROUSEL_API_KEY" in caplog.text) == warns
    assert "secret" not in caplog.text


def test_a_gpu_that_is_not_there(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [f"--model={model}", "--device=cuda"]
    monkeypatch.setattr(device, "DRIVER_FILES", ("/dev/no-such-driver",))
    refuses(capfd, arguments, BAD_SETTINGS, "device: cuda was asked for, but this machine has no driver")
    monkeypatch.setattr(device, "DRIVER_FILES", ("/dev/null",))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    refuses(capfd, arguments, BAD_SETTINGS, "(2.13.0+cpu) is a CPU build")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refuses(capfd, arguments, BAD_SETTINGS, "CUDA_VISIBLE_DEVICES names no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    assert launcher.main(arguments) == STARTED


TEMPLATE = """{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}
{% generation %}{{ m | tojson(indent=2) }}{% endgeneration %}{{ raise_exception("x") }}{% endfor %}"""


def _broken_and_unused(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "{{"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (_file("chat_template.jinja", TEMPLATE), []),
        (lambda model: (model / "chat_template.jinja").unlink(), []),
        (_broken_and_unused, []),
        (_file("chat_template.jinja", "{{"), ["--task=embed"]),
        (_file("chat_template.jinja", "{{"), ["--chat-template=own.jinja"]),
        (lambda model: (model / "tokenizer.json").unlink(), ["--skip-tokenizer-init"]),
        (lambda model: (model / WEIGHTS).unlink(), ["--load-format=dummy"]),
        (_file("consolidated.safetensors", b""), []),
    ],
)
def test_what_is_no_mistake(
    change: Change, arguments: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    Path("own.jinja").write_text(TEMPLATE)
    change(model)
    assert launcher.main(["--device=cpu", f"--model={model}", *arguments]) == STARTED


def test_a_grammar_backend_that_is_not_installed_names_its_extra(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device=cpu", f"--model={model}", "--grammar-backend=xgrammar"]
    assert launcher.main(arguments) == STARTED
    monkeypatch.setattr(implementations, "find_spec", lambda name: None)
    assert launcher.main(arguments) == BAD_SETTINGS
    assert "grammar_backend: xgrammar is not installed; pip install 'carousel[xgrammar]'" in (
        capfd.readouterr().err
    )


def test_a_grammar_backend_is_a_known_one_or_a_class(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device=cpu", f"--model={model}"]
    assert launcher.main([*arguments, "--grammar-backend=my_package.grammars:Vocabulary"]) == STARTED
    assert launcher.main([*arguments, "--grammar-backend=lark"]) == BAD_SETTINGS
    assert "grammar_backend: unknown 'lark'; known: auto, llguidance" in capfd.readouterr().err


def test_an_interrupt_while_modules_are_imported_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "main", interrupted)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "launch.py"), run_name="__main__")
    assert caught.value.code == 0
