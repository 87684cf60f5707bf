"""RuntimeConfig: every setting of a launch, in one frozen struct; the command line is generated from it.

A setting is declared once: its type and bounds check it, its description is its help text, `flags` are the
spellings that users of SGLang and vLLM type. `resolve()` fills in what depends on the model or the machine,
once, in the launcher; the other processes read the result. Environment variables are read in this file only.
"""

from __future__ import annotations

import argparse
import os
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from runtime.errors import ConfigError

DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo" / "model"


def _setting(description: str, *flags: str, **bounds: Any) -> Meta:
    return Meta(description=description, extra={"flags": flags}, **bounds)


class RuntimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings as given; `auto`, None and 0 stand for what `resolve` fills in."""

    model: Annotated[
        str, _setting("directory of a Hugging Face model; default: the demo model", "--model-path")
    ] = ""
    tokenizer: Annotated[
        str, _setting("directory of the tokenizer; default: the model's", "--tokenizer-path")
    ] = ""
    served_model_name: Annotated[
        str, _setting("the name in /v1/models and replies; default: the model's directory name")
    ] = ""
    chat_template: Annotated[str, _setting("file with a Jinja chat template that replaces the model's")] = ""
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], _setting("where weights come from; dummy: random ones")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "half", "float"],
        _setting("dtype of weights and KV cache; auto: the checkpoint's"),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], _setting("where the model runs")] = "auto"
    attention_backend: Annotated[
        str,
        _setting(
            "auto, cpu_native (C++, compiled at the first start), torch_native, or your own as "
            "package.module:Class"
        ),
    ] = "auto"
    cpu_threads: Annotated[int, _setting("threads of the CPU worker; 0: one per core", ge=0, le=1024)] = 0
    context_length: Annotated[
        int,
        _setting("longest sequence, prompt and output; 0: the model's", "--max-model-len", ge=0, le=1 << 22),
    ] = 0

    host: Annotated[str, _setting("address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, _setting("port of the HTTP server; 0 takes a free one", ge=0, le=65535)] = 30000
    api_key: Annotated[
        str, _setting("require this key (Authorization: Bearer ...); also CAROUSEL_API_KEY")
    ] = ""
    metrics_open: Annotated[bool, _setting("answer /metrics without the API key")] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _setting("how much the processes log")
    ] = "info"
    run_dir: Annotated[str, _setting("private directory of this launch; default: a new one per launch")] = ""
    no_http: Annotated[bool, _setting("serve the ZMQ client library only, without an HTTP server")] = False

    tp_size: Annotated[
        int, _setting("tensor-parallel ranks", "--tp", "--tensor-parallel-size", ge=1, le=64)
    ] = 1
    max_running_requests: Annotated[
        int, _setting("requests that run at the same time (rows)", "--max-num-seqs", ge=1, le=4096)
    ] = 256
    max_queued_requests: Annotated[
        int,
        _setting(
            "requests that may wait; more are refused with 503; 0: four times the rows", ge=0, le=1 << 20
        ),
    ] = 0
    max_total_tokens: Annotated[
        int, _setting("cap of the KV cache in tokens; 0: by memory alone, the smaller wins", ge=0, le=1 << 30)
    ] = 0
    mem_fraction_static: Annotated[
        float, _setting("share of free memory for the KV cache", "--gpu-memory-utilization", gt=0.0, lt=1.0)
    ] = 0.85
    page_size: Annotated[int, _setting("tokens per KV page", "--block-size", ge=1, le=256)] = 16
    chunked_prefill_size: Annotated[
        int, _setting("tokens computed in one step, at most", "--max-num-batched-tokens", ge=1, le=1 << 20)
    ] = 2048
    schedule_policy: Annotated[
        str,
        _setting(
            "order of the waiting queue: fcfs, lpm, or your own as package.module:Class",
            "--scheduling-policy",
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float, _setting("above 1: admit later and retract less; below 1: the reverse", gt=0.0, le=10.0)
    ] = 1.0
    disable_radix_cache: Annotated[
        bool, _setting("do not keep KV of earlier requests", "--no-enable-prefix-caching")
    ] = False
    disable_overlap_schedule: Annotated[
        bool, _setting("wait for each step before planning the next", "--no-async-scheduling")
    ] = False
    decode_log_interval: Annotated[int, _setting("steps between two decode log lines", ge=1, le=1 << 20)] = 40
    slow_reader_timeout: Annotated[
        float, _setting("seconds after which a client that does not read is cut off", gt=0.0, le=86400.0)
    ] = 120.0
    start_timeout: Annotated[
        float, _setting("seconds the processes have to get ready", gt=0.0, le=86400.0)
    ] = 600.0
    parent_pid: Annotated[int, _setting("end when this process ends; 0: do not watch", ge=0)] = 0

    @property
    def max_waiting(self) -> int:
        return self.max_queued_requests or 4 * self.max_running_requests


DTYPE_SPELLINGS = {"half": "float16", "float": "float32"}


def resolve(config: RuntimeConfig, *, context_length: int, dtype: str, model_path: Path) -> RuntimeConfig:
    """Fill in what was left open, from the model's own context length and dtype. Raises ConfigError."""
    if config.tp_size != 1:
        raise ConfigError(
            "tp_size: tensor parallelism is not available in this version; leave --tp-size at 1"
        )
    if config.context_length > context_length:
        raise ConfigError(
            f"context_length: {config.context_length} is more than the model's own {context_length} positions"
        )
    own = DTYPE_SPELLINGS.get(config.dtype, config.dtype)
    for name in ("chat_template",):
        value = getattr(config, name)
        if value and not Path(value).is_file():
            raise ConfigError(f"{name}: there is no file {value}")
    return msgspec.structs.replace(
        config,
        model=str(model_path),
        tokenizer=config.tokenizer or str(model_path),
        served_model_name=config.served_model_name or (model_path.name if config.model else "carousel-demo"),
        dtype=dtype if own == "auto" else own,
        device=_pick_device() if config.device == "auto" else config.device,
        context_length=config.context_length or context_length,
        api_key=config.api_key or os.environ.get("CAROUSEL_API_KEY", ""),
        cpu_threads=config.cpu_threads or len(os.sched_getaffinity(0)),
    )


def _pick_device() -> str:
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def default_run_root() -> Path:
    """The directory that holds the run directories of this user's launches."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    if runtime_dir and Path(runtime_dir).is_dir():
        return Path(runtime_dir) / "carousel"
    return Path("/tmp") / f"carousel-{os.getuid()}"


def kernel_cache_dir() -> Path:
    """Where compiled CPU kernels are kept, for this user and all launches."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    # The specification of that variable: a relative path is to be ignored.
    root = Path(cache_home) if cache_home and Path(cache_home).is_absolute() else Path.home() / ".cache"
    return root / "carousel"


def environment_run_dir() -> str:
    """CAROUSEL_RUN_DIR: the launch that clients connect to when none is named; empty when unset."""
    return os.environ.get("CAROUSEL_RUN_DIR", "")


def child_environment() -> dict[str, str]:
    """The environment of the processes of a ring: this one's, able to import the project."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = filter(None, [root, os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # A worker's OpenMP threads spin before they sleep. The default spin takes the cores from the other
    # processes: with two spinners beside it a step took 83 ms this way, over a second without (2 cores, EPYC,
    # 2026-11).
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    return environment


# -- command line ------------------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None, *, prog: str = "launch.py") -> RuntimeConfig:
    """The settings a command line asks for. Prints help or a
    usage error and exits like argparse, with code 64 for errors.
    """
    return from_values(vars(make_parser(prog).parse_args(argv)))


def from_values(values: dict[str, Any]) -> RuntimeConfig:
    """Check settings by name. Raises ConfigError that names the setting."""
    try:
        return msgspec.convert(values, RuntimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"setting is not valid: {error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def make_parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Serve a language model over HTTP (OpenAI compatible) and over ZMQ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    hints = typing.get_type_hints(RuntimeConfig, include_extras=True)
    for field in msgspec.structs.fields(RuntimeConfig):
        kind, meta = get_args(hints[field.name])
        assert isinstance(meta, Meta)
        assert meta.extra is not None
        options: dict[str, Any] = {"dest": field.name, "default": field.default, "help": meta.description}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
        parser.add_argument("--" + field.name.replace("_", "-"), *meta.extra["flags"], **options)
    return parser
