"""Fills in the settings that were left open, and refuses those that contradict each other."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import ssl
from importlib.util import find_spec
from pathlib import Path

import msgspec

from runtime.base.cgroup import num_cores
from runtime.base.cpu_isa import cpu_isa, machine_isa
from runtime.base.environment import api_key
from runtime.base.errors import ConfigError, InvalidRequest
from runtime.checkpoint.adapters.lora_config import read_adapter
from runtime.checkpoint.pooling import read_pooling
from runtime.launcher.checks.device import num_gpus, pick_device
from runtime.ring.endpoints import tcp_endpoints
from runtime.ring.tenants import read_tenants
from runtime.settings.config import SETTINGS, RuntimeConfig
from runtime.settings.graph_sizes import graph_sizes
from runtime.settings.model_settings import AdapterSettings
from runtime.settings.server_settings import HTTP_SETTINGS

logger = logging.getLogger(__name__)

NAMES = {
    "attention_backend": ("cpu_native", "flashinfer", "torch_native", "triton"),
    "capacity_scheduler": ("guaranteed_no_evict", "max_utilization", "static_batch"),
    "micro_batch_scheduler": (),
    "radix_eviction_policy": ("fifo", "filo", "lfu", "lru", "mru", "priority", "slru"),
    "request_scheduler": (),
    "schedule_policy": (
        "dfs-weight",
        "fcfs",
        "lof",
        "longest_prefix",
        "lpm",
        "priority",
        "random",
        "shortest-first",
    ),
}
"""Names of implementations by setting. Users' own, as package.module:Class, are allowed besides."""
BACKEND_DEVICES = {"cpu_native": "cpu", "flashinfer": "cuda", "triton": "cuda"}
"""Attention backends that only run on one kind of device."""
BY_PREFIX = ("lpm", "longest_prefix", "dfs-weight")
"""Schedule policies that use the cached length of prompts."""
HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
KEY_FILES = ("api_key_file", "api_keys")
"""Settings of the HTTP server that also matter to clients over TCP: these have sections in the files, and
SIGHUP reloads them.
"""
GRAMMAR_BACKENDS = ("auto", "llguidance", "xgrammar", "none")
OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OWN_PATHS = ("/profiles", "/stats", "/timelines", "/v1", "/v1/chat", "/v1/messages", "/v1/models", "/v2")
"""Beginnings of the HTTP server's own paths. As a root path they would be stripped from these."""
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")
DTYPE_SPELLINGS = {"half": "float16", "float": "float32"}


def resolve(
    config: RuntimeConfig,
    *,
    context_length: int,
    dtype: str,
    model_path: Path,
    has_spec: bool = True,
    has_head: bool = True,
) -> RuntimeConfig:
    """Return the settings with open ones filled in, from the model's context length and dtype. Raises
    ConfigError.
    """
    if not has_head and config.task == "generate":
        raise ConfigError("task: this checkpoint has no language-model head; serve it with --task embed")
    if not has_spec and config.tp_size != 1:
        raise ConfigError(
            "tp_size: --model-impl transformers computes on one rank only; leave --tp-size at 1, or use a "
            "model that has a spec (docs/models.md)"
        )
    if config.context_length > context_length:
        raise ConfigError(
            f"context_length: {config.context_length} is more than the model's own {context_length} "
            "positions; --rope-scaling stretches them, --hf-overrides says another number (docs/models.md)"
        )
    longest = SETTINGS["context_length"][1].le
    if longest is not None and (config.context_length or context_length) > longest:
        says = "--hf-overrides or --rope-scaling" if config.hf_overrides else "config.json"
        raise ConfigError(
            f"context_length: the model has {context_length} positions by its {says}; served are {longest} "
            "at most, so give a smaller --context-length"
        )
    device = pick_device() if config.device == "auto" else config.device
    if device == "cuda" and config.tp_size > max(1, found := num_gpus()):
        raise ConfigError(f"tp_size: {config.tp_size} ranks need as many GPUs; there are {found}")
    own = DTYPE_SPELLINGS.get(config.dtype, config.dtype)
    _check_names(config)
    _check_traces(config)
    _check_attention_backend(config.attention_backend, device)
    _check_tokenizer(config)
    _check_task(config, model_path)
    grammar_backend = _grammar_backend(config)
    _check_http(config)
    _check_tls(config)
    _check_tcp(config)
    _check_kv_cache(config)
    _check_profile_dir(config)
    _check_scheduling(config, has_spec)
    _check_logits_processors(config)
    _check_graphs(config, device)
    _check_kv_dtype(config, device)
    _check_quantization(config, device, has_spec)
    served_model_name = config.served_model_name or (model_path.name if config.model else "carousel-demo")
    config = _with_adapters(
        msgspec.structs.replace(config, served_model_name=served_model_name), device, has_spec
    )
    if config.deterministic:
        _check_deterministic(device, has_spec)
    if not config.has_api_keys:
        config = msgspec.structs.replace(config, api_key=_key_of_environment(config))
    _check_api_keys(config)
    _check_stages(config, device, has_spec)
    _check_idle(config)
    isa = cpu_isa()
    if device == "cpu":
        held_back = f", of the {machine_isa()} that this CPU has" if isa != machine_isa() else ""
        logger.info("CPU kernels use instruction sets up to %s%s", isa, held_back)
    return msgspec.structs.replace(
        config,
        model=str(model_path),
        tokenizer="" if config.skip_tokenizer_init else config.tokenizer or str(model_path),
        dtype=dtype if own == "auto" else own,
        model_impl="native" if has_spec else "transformers",
        batching_type=config.batching,
        grammar_backend=grammar_backend,
        capacity_scheduler="auto" if config.request_scheduler else config.capacity_policy,
        device=device,
        context_length=config.context_length or context_length,
        root_path=config.root_path.rstrip("/"),
        ssl_certfile=_absolute(config.ssl_certfile),
        ssl_keyfile=_absolute(config.ssl_keyfile),
        cpu_isa=isa,
        cpu_threads=config.cpu_threads or max(1, num_cores() // max(1, config.ranks_per_node)),
    )


def check_settings(config: RuntimeConfig) -> None:
    """Refuse settings that are wrong with any model, before one is downloaded. Raises ConfigError."""
    if not config.has_api_keys:
        config = msgspec.structs.replace(config, api_key=_key_of_environment(config))
    for check in (_check_names, _check_traces, _grammar_backend, _check_http, _check_tls, _check_tcp):
        check(config)
    for check in (_check_kv_cache, _check_profile_dir, _check_logits_processors, _check_idle):
        check(config)
    _check_api_keys(config)
    if not config.tokenizer or os.path.isdir(config.tokenizer):  # it may be a name, too
        _check_tokenizer(config)
    _check_scheduling(config, has_spec=True)
    _with_adapters(config, "cpu", has_spec=True)
    if config.device != "auto":
        _check_attention_backend(config.attention_backend, config.device)
        _check_kv_dtype(config, config.device)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _check_traces(config: RuntimeConfig) -> None:
    endpoint = config.otlp_traces_endpoint
    if not endpoint:
        if config.trace_content and not any(map(os.environ.get, OTLP_ENDPOINTS)):
            raise ConfigError(
                "trace_content: no traces are sent; name a collector (--otlp-traces-endpoint) or leave it out"
            )
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_traces_endpoint: {endpoint!r} is no URL; it begins with http:// or https://")
    if find_spec("opentelemetry") is None:
        raise ConfigError(
            "otlp_traces_endpoint: OpenTelemetry is not installed; pip install 'carousel[otel]'"
            " (docs/observability.md)"
        )


def _check_names(config: RuntimeConfig) -> None:
    """Check that every named implementation exists. Otherwise the process that imports it would fail later,
    in one case only after loading the weights.
    """
    default = RuntimeConfig()
    for setting, names in NAMES.items():
        name = config.capacity_policy if setting == "capacity_scheduler" else getattr(config, setting)
        if name not in (getattr(default, setting), *names) and ":" not in name:
            known = f"{', '.join(names)}, or " if names else ""
            flag = setting.replace("_", "-")
            raise ConfigError(
                f"{setting}: --{flag} {name!r} is unknown; {known}your own as package.module:Class"
            )


def _check_attention_backend(name: str, device: str) -> None:
    if device == BACKEND_DEVICES.get(name, device):
        return
    raise ConfigError(
        f"attention_backend: {name} cannot be used: the device is {device}; leave --attention-backend out"
    )


def _check_kv_dtype(config: RuntimeConfig, device: str) -> None:
    if config.kv_cache_dtype == "auto":
        return
    if device != "cuda":
        raise ConfigError(f"kv_cache_dtype: {config.kv_cache_dtype} is for CUDA; the device is {device}")
    if config.attention_backend not in ("auto", "triton"):
        raise ConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype} is read by --attention-backend triton, not by "
            f"{config.attention_backend}"
        )


def _check_api_keys(config: RuntimeConfig) -> None:
    read_tenants(config)
    for name in ("cache_salt_per_api_key", "share_prefixes_across_keys"):
        if getattr(config, name) and not config.has_api_keys and not config.curve_dir:
            raise ConfigError(f"{name}: without --api-key or --api-keys there are no keys to tell apart")
    if config.share_prefixes_across_keys and config.cache_salt_per_api_key:
        raise ConfigError("cache_salt_per_api_key: share_prefixes_across_keys is the opposite; give one")


def _key_of_environment(config: RuntimeConfig) -> str:
    """Return CAROUSEL_API_KEY, empty when unset. Raises ConfigError if it is set but blank, because its
    author wants a key.
    """
    key = api_key()
    if key is None:
        return ""
    if not key.strip() and not config.no_http:
        raise ConfigError(
            "CAROUSEL_API_KEY: the value is empty; set a key, or unset the variable to serve without one"
        )
    return key.strip()


def _check_deterministic(device: str, has_spec: bool) -> None:
    """Raise ConfigError for settings without a fixed order of summation. The worker itself checks the CPU."""
    if device != "cpu":
        raise ConfigError("deterministic: CUDA's matrix products depend on the batch; use --device cpu")
    if not has_spec:
        raise ConfigError(
            "deterministic: the transformers library's own modules promise no order of summation; use one "
            "that has a spec (docs/models.md)"
        )


def _check_quantization(config: RuntimeConfig, device: str, has_spec: bool) -> None:
    if config.quantization == "auto":
        return
    if device != "cpu":
        raise ConfigError(
            f"quantization: {config.quantization} is for a CPU; use --device cpu, or a float8 checkpoint"
        )
    if not has_spec:
        raise ConfigError(
            f"quantization: {config.quantization} needs a model that has a spec (docs/models.md), which the "
            "transformers library's own modules are not"
        )


def _with_adapters(config: RuntimeConfig, device: str, has_spec: bool) -> RuntimeConfig:
    """Return the settings with absolute paths of the adapters, after checking what can be checked without the
    model. Raises ConfigError.
    """
    paths = config.adapter_paths
    if not (config.enable_lora or paths):
        default = RuntimeConfig()
        for name in AdapterSettings.__annotations__.keys() - {"TITLE", "enable_lora", "lora_modules"}:
            if getattr(config, name) != getattr(default, name):
                raise ConfigError(f"{name}: no adapters are served; add --enable-lora, or leave it out")
        return config
    if device != "cpu" and config.tp_size > 1:
        raise ConfigError("enable_lora: several GPUs compute no adapters; use --tp-size 1, or merge one")
    if not has_spec:
        raise ConfigError(
            "enable_lora: adapters need a model that has a spec (docs/models.md), which the transformers "
            "library's own modules are not"
        )
    if config.task == "embed":
        raise ConfigError("enable_lora: an embedding model has no adapters")
    if device != "cpu":
        for name in ("lora_device_rows", "lora_device_percent"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name}: a GPU's tables are for --max-loras adapters of --max-lora-rank; lower these"
                )
    modules = {name: Path(path).absolute() for name, path in paths.items()}
    for path in modules.values():
        try:
            read_adapter(path, config.max_lora_rank)
        except InvalidRequest as error:
            raise ConfigError(f"lora_modules: {error.message}") from None
    if config.allow_lora_updates and not config.lora_dir:
        raise ConfigError("allow_lora_updates: say with --lora-dir below which directory adapters are")
    if config.lora_dir and not os.path.isdir(config.lora_dir):
        raise ConfigError(f"lora_dir: there is no directory {config.lora_dir}")
    return msgspec.structs.replace(
        config,
        enable_lora=True,
        lora_modules=",".join(f"{name}={path}" for name, path in modules.items()),
        lora_dir=os.path.abspath(config.lora_dir) if config.lora_dir else "",
    )


def _check_tokenizer(config: RuntimeConfig) -> None:
    if config.chat_template and not os.path.isfile(config.chat_template):
        raise ConfigError(f"chat_template: there is no file {config.chat_template}")
    if config.tokenizer and not os.path.isdir(config.tokenizer):
        raise ConfigError(f"tokenizer: there is no directory {config.tokenizer}")
    if config.skip_tokenizer_init and (config.tokenizer or config.chat_template):
        name = "tokenizer" if config.tokenizer else "chat_template"
        raise ConfigError(f"{name}: skip_tokenizer_init loads no tokenizer; give only one of them")
    if config.skip_tokenizer_init and config.allow_special_tokens:
        raise ConfigError(
            "allow_special_tokens: skip_tokenizer_init takes no messages; give only one of them"
        )


def _check_task(config: RuntimeConfig, model_path: Path) -> None:
    """Check an embedding model's pooling before anything is loaded. Raises ModelError for a kind that is not
    supported.
    """
    if config.task == "embed":
        read_pooling(model_path, config.pooling)
        for name in ("gather_context_logits", "gather_generation_logits"):
            if getattr(config, name):
                raise ConfigError(f"{name}: an embedding model has no logits")
        if config.speculative_algorithm != "none":
            raise ConfigError("speculative_algorithm: an embedding model generates nothing to guess")
    elif config.pooling != "auto":
        raise ConfigError(f"pooling: {config.pooling} is for an embedding model; add --task embed")


def _grammar_backend(config: RuntimeConfig) -> str:
    backend = config.grammar_backend
    if ":" not in backend and backend not in GRAMMAR_BACKENDS:
        known = ", ".join(GRAMMAR_BACKENDS)
        raise ConfigError(
            f"grammar_backend: unknown {backend!r}; known: {known}, or your own as package.module:Class"
        )
    needed = {"skip_tokenizer_init": config.skip_tokenizer_init, "task embed": config.task == "embed"}
    has_none = [name for name, is_so in needed.items() if is_so]
    if backend not in ("auto", "none") and has_none:
        raise ConfigError(f"grammar_backend: with {has_none[0]} there is no text to guide; leave it out")
    if backend == "xgrammar" and find_spec("xgrammar") is None:
        raise ConfigError("grammar_backend: xgrammar is not installed; pip install 'carousel[xgrammar]'")
    if has_none:
        return "none"
    return "llguidance" if backend == "auto" else backend


def _check_profile_dir(config: RuntimeConfig) -> None:
    path = config.profile_dir
    if path and not (os.path.isdir(path) and os.access(path, os.W_OK)):
        raise ConfigError(f"profile_dir: {path} is no directory that this user may write to")


def _check_http(config: RuntimeConfig) -> None:
    for origin in config.origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(f"cors_origins: {origin} is neither * nor like https://a.example or with :PORT")
    for name in config.host_names:
        if name != "*" and not HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"allowed_hosts: {name} is neither * nor like a.example or *.example; give no scheme or port"
            )
    for proxy in config.proxies:
        if proxy != "*" and not _is_network(proxy):
            raise ConfigError(f"forwarded_allow_ips: {proxy} is neither * nor like 10.0.0.1 or 10.0.0.0/8")
    _ = config.template_defaults  # raises where it is no object
    if config.root_path and not ROOT_PATH.fullmatch(config.root_path):
        raise ConfigError(f"root_path: {config.root_path!r} is not like /llm or /a/b")
    if not {".", ".."}.isdisjoint(config.root_path.split("/")):
        raise ConfigError(
            f"root_path: {config.root_path!r} has . or .. between slashes, which clients resolve before they "
            "ask; name the path itself"
        )
    if config.root_path.rstrip("/") in OWN_PATHS:
        raise ConfigError(f"root_path: paths of this server begin with {config.root_path}; choose another")
    for name in HTTP_SETTINGS:
        if config.no_http and getattr(config, name) != getattr(RuntimeConfig(), name):
            raise ConfigError(f"{name}: with no_http there is no HTTP server; leave it out")
    for name in KEY_FILES:
        if config.no_http and not config.curve_dir and getattr(config, name):
            raise ConfigError(
                f"{name}: with no_http there is no HTTP server, and without --curve-dir nobody over TCP who "
                "is told from others; leave it out"
            )
    if config.no_http and config.port not in (0, RuntimeConfig().port):  # 0 asks for none in particular
        raise ConfigError("port: with no_http there is no HTTP server; leave it out")


def _check_tls(config: RuntimeConfig) -> None:
    """Raise ConfigError for TLS settings with which each process of the HTTP server would fail."""
    if config.ssl_keyfile and not config.ssl_certfile:
        raise ConfigError("ssl_keyfile: a key needs its certificate; name the file with --ssl-certfile")
    if not config.ssl_certfile:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(config, name)
        try:
            if path:
                Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{name}: {path} cannot be read: {error.strerror}") from None
    try:
        # Without the third argument an encrypted key would be asked for at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile or None, lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        name = "ssl_keyfile" if config.ssl_keyfile else "ssl_certfile"
        raise ConfigError(
            f"{name}: {config.ssl_certfile} and {config.ssl_keyfile or 'itself'} are not a certificate and "
            f"its key, both in PEM and the key without a password ({error})"
        ) from None


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _check_tcp(config: RuntimeConfig) -> None:
    try:
        tcp = tcp_endpoints(config)
    except ValueError as error:
        raise ConfigError(f"zmq_bind: {error}") from None
    if tcp is None and config.curve_dir:
        raise ConfigError("curve_dir: its keys are for clients over TCP; name the address with --zmq-bind")
    if config.curve_dir and config.run_dir:
        keys, run_dir = Path(config.curve_dir).resolve(), Path(config.run_dir).resolve()
        if keys.is_relative_to(run_dir):
            raise ConfigError(f"curve_dir: {keys} lies in run_dir, which goes with its launch; move the keys")
    if tcp is not None and not tcp.is_loopback and not config.curve_dir:
        raise ConfigError(
            f"zmq_bind: {config.zmq_bind} can be reached from other machines; that needs keys: name their "
            "directory with --curve-dir (python -m runtime.ring.keys DIR makes one)"
        )


def _check_kv_cache(config: RuntimeConfig) -> None:
    if config.max_total_tokens and config.max_total_tokens < max(2, config.page_size):
        raise ConfigError(
            f"max_total_tokens: {config.max_total_tokens} is less than a page of {config.page_size} tokens; "
            "raise it, or lower --page-size"
        )
    if config.disable_radix_cache and config.radix_eviction_policy != "lru":
        raise ConfigError("radix_eviction_policy: with disable_radix_cache there is nothing to evict")
    if config.disable_radix_cache and config.schedule_policy in BY_PREFIX:
        raise ConfigError(
            f"schedule_policy: {config.schedule_policy} orders by cached prefixes, and with "
            "disable_radix_cache there are none; take fcfs"
        )


def _check_graphs(config: RuntimeConfig, device: str) -> None:
    graph_sizes(config)
    for name in ("cuda_graph_bs", "cuda_graph_max_bs"):
        if device == "cpu" and getattr(config, name):
            raise ConfigError(f"{name}: the device is a CPU, which has no CUDA graphs; leave it out")
        if config.task == "embed" and getattr(config, name):
            raise ConfigError(f"{name}: steps of an embedding model are not recorded; leave it out")
    if config.disable_cuda_graph and config.task == "embed":
        logger.info("disable_cuda_graph: nothing changes: steps of an embedding model are not recorded")
    elif config.disable_cuda_graph and device == "cpu" and config.tp_size > 1:
        logger.info("disable_cuda_graph: nothing changes: steps of several ranks on a CPU are not recorded")


def _check_stages(config: RuntimeConfig, device: str, has_spec: bool) -> None:
    """Raise ConfigError for settings that pipeline stages do not support."""
    if config.pp_size == 1:
        if config.pp_layers:
            raise ConfigError("pp_layers: there is one stage; add --pp-size, or leave it out")
        return
    reasons = {
        "device": (device != "cpu", "stages compute on a CPU; use --device cpu, or --tp-size on GPUs"),
        "model_impl": (not has_spec, "has no stages; use a model that has a spec (docs/models.md)"),
        "task": (config.task == "embed", "embeddings have no stages; leave --pp-size at 1"),
        "speculative_algorithm": (
            config.speculative_algorithm != "none",
            "guesses are not verified in stages; leave it out, or --pp-size at 1",
        ),
        "enable_lora": (
            config.enable_lora or bool(config.adapter_paths),
            "adapters are not cut into stages; leave it out, or --pp-size at 1",
        ),
        "additional_output": (
            bool(config.additional_outputs),
            "stages hand over no tensors of layers; leave it out, or --pp-size at 1",
        ),
        "logits_processors": (
            bool(config.logits_processor_paths),
            "are not called in stages; leave them out, or --pp-size at 1",
        ),
        "max_beam_width": (
            config.max_beam_width > 1,
            "beams step together, which micro-batches do not; leave it at 1, or --pp-size at 1",
        ),
    }
    for name, (is_so, reason) in reasons.items():
        if is_so:
            raise ConfigError(f"pp_size: {config.pp_size} stages, but {name}: {reason}")


def _check_idle(config: RuntimeConfig) -> None:
    """Raise ConfigError for settings of parts that this launch does not have, which would have no effect."""
    default = RuntimeConfig()
    if config.restart == "never":
        for name in ("max_restarts", "max_engine_restarts", "restart_window"):
            if getattr(config, name) != getattr(default, name):
                raise ConfigError(f"{name}: with --restart never nothing is restarted; leave it out")
    gathers = config.gather_context_logits or config.gather_generation_logits or config.additional_outputs
    if config.max_logits_bytes != default.max_logits_bytes and not gathers:
        raise ConfigError(
            "max_logits_bytes: no request may ask for raw logits; allow it with --gather-context-logits, "
            "--gather-generation-logits or --additional-output, or leave it out"
        )
    guesses = "speculative_num_draft_tokens"
    if config.speculative_algorithm == "none" and getattr(config, guesses) != getattr(default, guesses):
        raise ConfigError(
            f"{guesses}: nothing is guessed; add --speculative-algorithm NGRAM, or leave it out"
        )
    if config.metrics_open and not config.has_api_keys:
        raise ConfigError("metrics_open: without an API key /metrics is open; leave it out")


def _check_scheduling(config: RuntimeConfig, has_spec: bool) -> None:
    """Raise ConfigError for scheduling settings that contradict each other."""
    if config.enable_dynamic_chunking and (config.disable_chunked_prefill or not has_spec):
        reason = (
            "prompts are computed whole with --disable-chunked-prefill"
            if config.disable_chunked_prefill
            else "what a token costs is known of models that have a spec (docs/models.md)"
        )
        raise ConfigError(f"enable_dynamic_chunking: {reason}; leave one of them out")
    if config.max_beam_width > config.max_running_requests:
        raise ConfigError(
            f"max_beam_width: {config.max_beam_width} beams take as many rows, of which max_running_requests "
            f"gives {config.max_running_requests}; raise that, or ask for fewer beams"
        )
    if config.max_beam_width > 1 and config.beam_batching == "drain" and config.schedule_policy != "fcfs":
        raise ConfigError(
            "schedule_policy: with --beam-batching drain requests start in the order of their arrival, not "
            f"by {config.schedule_policy}; leave one of them out"
        )
    if config.max_beam_width > 1 and config.task == "embed":
        raise ConfigError("max_beam_width: an embedding model searches nothing; leave it out")
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


def _check_logits_processors(config: RuntimeConfig) -> None:
    """Raise ConfigError if a logits processor cannot be found. Only the worker imports them, because they
    need torch.
    """
    if not config.logits_processor_paths:
        if config.disable_logits_processor_replicate:
            raise ConfigError(
                "disable_logits_processor_replicate: there are none; add --logits-processor, or leave it out"
            )
    elif config.batching == "static":
        raise ConfigError(
            "logits_processor: not supported with static batching (--batching-type); leave one of them out"
        )
    elif config.task == "embed":
        raise ConfigError("logits_processor: an embedding model has no logits")
