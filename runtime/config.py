"""RuntimeConfig: every setting of a launch, in one frozen struct; the command line is generated from it.

A setting is declared once: its type and bounds check it, its description is its help text, `flags` are the
spellings that users of SGLang and vLLM type. `resolve()` fills in what depends on the model or the machine,
once, in the launcher; the other processes read the result. Environment variables are read in this file only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from runtime.endpoints import TcpEndpoints
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
    skip_tokenizer_init: Annotated[
        bool, _setting("load no tokenizer: token ids in, token ids out; the model needs no tokenizer files")
    ] = False
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
    cpu_threads: Annotated[
        int,
        _setting(
            "threads of the CPU worker; 0: one per core, but for a small model behind HTTP one less",
            ge=0,
            le=1024,
        ),
    ] = 0
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
    api_workers: Annotated[
        int, _setting("processes of the HTTP server", "--api-server-count", ge=1, le=64)
    ] = 1
    cors_origins: Annotated[
        str,
        _setting(
            "origins whose pages may call the HTTP server, separated by commas; * for all; default: none",
            "--allowed-origins",
        ),
    ] = ""
    tokenizer_workers: Annotated[
        int, _setting("tokenizer processes", "--tokenizer-worker-num", ge=1, le=64)
    ] = 1
    detokenizer_workers: Annotated[int, _setting("detokenizer processes", ge=1, le=64)] = 1
    zmq_bind: Annotated[
        str,
        _setting(
            "serve the client library over TCP too, as tcp://ADDRESS:PORT; the ports after it are used too"
        ),
    ] = ""
    curve_dir: Annotated[
        str,
        _setting(
            "directory with server.key_secret and a folder clients/ of the public keys that may connect "
            "over TCP; needed for any address but loopback"
        ),
    ] = ""
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
        int,
        _setting(
            "tokens computed in one step, at most",
            "--max-num-batched-tokens",
            "--max-num-tokens",
            ge=1,
            le=1 << 20,
        ),
    ] = 2048
    max_batch_size: Annotated[
        int, _setting("requests computed in one step, at most; 0: all that run", ge=0, le=4096)
    ] = 0
    batching_type: Annotated[
        Literal["inflight_fused", "inflight", "static", "InflightFusedBatching", "InflightBatching", "V1"],
        _setting(
            "what one step is made of: prompts and decodes (inflight_fused), one or the other (inflight), or "
            "a batch that is closed until its last request has ended (static); docs/batching.md",
            "--model-type",
        ),
    ] = "inflight_fused"
    capacity_scheduler: Annotated[
        str,
        _setting(
            "who fits: max_utilization (pauses requests when the KV cache is full), guaranteed_no_evict "
            "(never does), static_batch (nor lets anybody join), or your own as package.module:Class; auto: "
            "max_utilization, with static batching static_batch",
            "--capacity-scheduler-policy",
        ),
    ] = "auto"
    micro_batch_scheduler: Annotated[
        str,
        _setting(
            "who of those that fit is in the next step: your own as package.module:Class; default: all of "
            "them, within the limits of a step"
        ),
    ] = ""
    request_scheduler: Annotated[
        str,
        _setting(
            "in place of capacity scheduler and micro-batch scheduler: your own as package.module:Class"
        ),
    ] = ""
    gather_context_logits: Annotated[
        bool, _setting("allow requests to ask for the raw logits of their prompt")
    ] = False
    gather_generation_logits: Annotated[
        bool, _setting("allow requests to ask for the raw logits of their output")
    ] = False
    max_logits_bytes: Annotated[
        int, _setting("raw logits of one sequence, at most; more is refused", ge=0, le=1 << 36)
    ] = 256 << 20
    schedule_policy: Annotated[
        str,
        _setting(
            "order of the waiting queue: fcfs, priority, lpm, dfs-weight, shortest-first, lof, random, or "
            "your own as package.module:Class",
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

    @property
    def batching(self) -> str:
        """The batching type under its own name."""
        return BATCHING_SPELLINGS.get(self.batching_type, self.batching_type)

    @property
    def capacity_policy(self) -> str:
        """The name of a capacity policy, or the user's own package.module:Class."""
        if self.capacity_scheduler == "auto":
            return "static_batch" if self.batching == "static" else "max_utilization"
        return self.capacity_scheduler if ":" in self.capacity_scheduler else self.capacity_scheduler.lower()

    @property
    def num_processes(self) -> dict[str, int]:
        """Of the roles of which there may be several."""
        return {
            "tokenizer": self.tokenizer_workers,
            "detokenizer": self.detokenizer_workers,
            "api": self.api_workers,
        }

    @property
    def tcp(self) -> TcpEndpoints | None:
        """Where the client library is served over TCP. Raises ValueError that says what is wrong with it."""
        if not self.zmq_bind:
            return None
        return TcpEndpoints.parse(self.zmq_bind, self.tokenizer_workers, self.detokenizer_workers)


BATCHING_SPELLINGS = {
    "InflightFusedBatching": "inflight_fused",
    "InflightBatching": "inflight",
    "V1": "static",
}
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
    _check_tokenizer(config)
    _check_tcp(config)
    _check_scheduling(config)
    return msgspec.structs.replace(
        config,
        model=str(model_path),
        tokenizer="" if config.skip_tokenizer_init else config.tokenizer or str(model_path),
        served_model_name=config.served_model_name or (model_path.name if config.model else "carousel-demo"),
        dtype=dtype if own == "auto" else own,
        batching_type=config.batching,
        capacity_scheduler="auto" if config.request_scheduler else config.capacity_policy,
        device=_pick_device() if config.device == "auto" else config.device,
        context_length=config.context_length or context_length,
        api_key=config.api_key or os.environ.get("CAROUSEL_API_KEY", ""),
        cpu_threads=config.cpu_threads or _pick_cpu_threads(config, model_path),
    )


def _check_tokenizer(config: RuntimeConfig) -> None:
    if config.chat_template and not Path(config.chat_template).is_file():
        raise ConfigError(f"chat_template: there is no file {config.chat_template}")
    if config.tokenizer and not Path(config.tokenizer).is_dir():
        raise ConfigError(f"tokenizer: there is no directory {config.tokenizer}")
    if config.skip_tokenizer_init and (config.tokenizer or config.chat_template):
        name = "tokenizer" if config.tokenizer else "chat_template"
        raise ConfigError(f"{name}: skip_tokenizer_init loads no tokenizer; give only one of them")


def _check_tcp(config: RuntimeConfig) -> None:
    try:
        tcp = config.tcp
    except ValueError as error:
        raise ConfigError(f"zmq_bind: {error}") from None
    if tcp is None and config.curve_dir:
        raise ConfigError("curve_dir: its keys are for clients over TCP; name the address with --zmq-bind")
    if tcp is not None and not tcp.is_loopback and not config.curve_dir:
        raise ConfigError(
            f"zmq_bind: {config.zmq_bind} can be reached from other machines; that needs keys: name their "
            "directory with --curve-dir (python -m runtime.keys DIR makes one)"
        )


def _check_scheduling(config: RuntimeConfig) -> None:
    """Refuse what one setting says and another does not let it do."""
    capacity = config.capacity_policy
    if config.batching == "static" and capacity != "static_batch":
        raise ConfigError(f"capacity_scheduler: with static batching it is static_batch, not {capacity}")
    if config.batching != "inflight_fused" and (config.micro_batch_scheduler or config.request_scheduler):
        raise ConfigError("batching_type: your own scheduler decides what a step is made of")
    if config.request_scheduler and (config.capacity_scheduler != "auto" or config.micro_batch_scheduler):
        raise ConfigError(
            "request_scheduler: it stands for capacity and micro-batch scheduler; give one or both"
        )
    if config.schedule_policy == "priority" and (capacity != "max_utilization" or config.request_scheduler):
        raise ConfigError("schedule_policy: priority takes rows back, which only max_utilization does")
    if config.schedule_conservativeness != 1.0 and capacity != "max_utilization":
        raise ConfigError(f"schedule_conservativeness: {capacity} estimates nothing that it could change")


# A step of a model below this size takes no longer than the other processes do for its tokens (64 streams).
# They then need a core: with both of two cores in the worker's team, each of its parallel regions waits for
# the thread that was put aside. Demo model, 64 streams over HTTP: 8,400 tok/s with two threads, 10,400 with
# one; offline, where nobody needs the other core, 13,900 and 11,000 (2 cores, EPYC, 2026-11).
SMALL_MODEL_BYTES = 64 << 20


def _pick_cpu_threads(config: RuntimeConfig, model_path: Path) -> int:
    num_cores = len(os.sched_getaffinity(0))
    num_bytes = sum(path.stat().st_size for path in model_path.glob("*.safetensors"))
    leaves_one = not config.no_http and num_bytes < SMALL_MODEL_BYTES
    return max(1, num_cores - 1) if leaves_one else num_cores


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


def from_values(values: dict[str, Any]) -> RuntimeConfig:
    """Check settings by name. Raises ConfigError that names the setting."""
    try:
        return msgspec.convert(values, RuntimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"setting is not valid: {error}") from None
