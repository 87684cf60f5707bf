"""TensorRT-LLM's configuration objects of an executor, and the settings of launch.py that they stand for.

They are plain data: nothing is started or read. A field for an unsupported feature is refused by name, unless
it has the value that leaves the feature off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from runtime.base.errors import ConfigError, InvalidRequest
from runtime.sampling.table import MAX_DRAFT_TOKENS

FREE_MEMORY_FRACTION = 0.9
"""TensorRT-LLM's default share of free memory for the KV cache."""
BATCHING_TYPES = {"INFLIGHT": "inflight_fused", "STATIC": "static"}
CHUNKING_POLICIES = (None, "FIRST_COME_FIRST_SERVED")
MAX_INT32 = (1 << 31) - 1


class CapacitySchedulerPolicy(Enum):
    """Capacity policies: which requests fit into the KV cache. The value is the setting of launch.py."""

    MAX_UTILIZATION = "max_utilization"
    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    STATIC_BATCH = "static_batch"


class AskedSettings(NamedTuple):
    """Settings of launch.py, each with the name of the field that stands for it."""

    by_caller: dict[str, tuple[str, Any]]
    """Settings for the fields that the caller has set: setting -> (field, value)."""
    by_default: dict[str, tuple[str, Any]]
    """Settings for the fields that are not set, with TensorRT-LLM's defaults. Everything that the caller
    gives takes precedence.
    """

    def add(self, field: str, setting: str, value: Any, *, is_default: bool) -> None:
        """Add the setting of one field."""
        (self.by_default if is_default else self.by_caller)[setting] = (field, value)

    def extend(self, other: AskedSettings) -> None:
        self.by_caller.update(other.by_caller)
        self.by_default.update(other.by_default)


def nothing_asked() -> AskedSettings:
    return AskedSettings({}, {})


@dataclass(slots=True)
class SchedulerConfig:
    """Choice of the capacity policy. `policy` is an older name of `capacity_scheduler_policy`."""

    capacity_scheduler_policy: str | Enum = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    """Name, member of TensorRT-LLM's enum or of ours, or your own class as package.module:Class."""
    context_chunking_policy: str | Enum | None = None
    """Order of prompt chunks: FIRST_COME_FIRST_SERVED, which is always used. EQUAL_PROGRESS is unsupported.
    """
    dynamic_batch_config: Any = None
    """Unsupported: refused unless None."""
    policy: str | Enum | None = None

    def asked(self) -> AskedSettings:
        """Return the settings for this object. Raises ConfigError."""
        _refuse_unbuilt(self, "scheduler_config", {"dynamic_batch_config": (None,)})
        if _name(self.context_chunking_policy) not in CHUNKING_POLICIES:
            raise ConfigError(
                "scheduler_config.context_chunking_policy: only FIRST_COME_FIRST_SERVED is built"
            )
        field = "capacity_scheduler_policy" if self.policy is None else "policy"
        chosen = getattr(self, field)
        default = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
        if field == "policy" and self.capacity_scheduler_policy not in (default, chosen):
            raise ConfigError(
                "scheduler_config.policy: contradicts capacity_scheduler_policy, which it is another name of"
            )
        asked = nothing_asked()
        is_default = self.policy is None and chosen is default
        value = _capacity_scheduler(f"scheduler_config.{field}", chosen)
        asked.add(f"scheduler_config.{field}", "capacity_scheduler", value, is_default=is_default)
        return asked


@dataclass(slots=True)
class KvCacheConfig:
    """Size of the KV cache, and what it keeps."""

    enable_block_reuse: bool = True
    """True to reuse whole pages; the two fields about partial reuse have no effect."""
    max_tokens: int | None = None
    max_attention_window: int | list[int] | None = None
    """Attention window of each layer, in tokens. All layers must have the same."""
    sink_token_length: int | None = None
    """Unsupported: refused unless it is neutral."""
    free_gpu_memory_fraction: float | None = None
    """Share of free memory for the KV cache; None is 0.9. On a CPU it is a share of the CPU's free memory."""
    host_cache_size: int | None = None
    """Unsupported, like the fields below: refused unless it is neutral."""
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True

    def asked(self) -> AskedSettings:
        """Return the settings for this object. Raises ConfigError."""
        unbuilt = {
            "sink_token_length": (None, 0),
            "host_cache_size": (None, 0),
            "onboard_blocks": (True,),
            "cross_kv_cache_fraction": (None,),
            "secondary_offload_min_priority": (None,),
            "event_buffer_max_size": (0,),
        }
        _refuse_unbuilt(self, "kv_cache_config", unbuilt)
        for name in ("enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse"):
            _check_bool(f"kv_cache_config.{name}", getattr(self, name))
        asked = nothing_asked()
        reuses = self.enable_block_reuse
        asked.add("kv_cache_config.enable_block_reuse", "disable_radix_cache", not reuses, is_default=reuses)
        field, fraction = "kv_cache_config.free_gpu_memory_fraction", self.free_gpu_memory_fraction
        value = FREE_MEMORY_FRACTION if fraction is None else _fraction(field, fraction)
        asked.add(field, "mem_fraction_static", value, is_default=fraction is None)
        if self.max_tokens is not None:
            field = "kv_cache_config.max_tokens"
            asked.add(field, "max_total_tokens", _count(field, self.max_tokens), is_default=False)
        if self.max_attention_window is not None:
            field = "kv_cache_config.max_attention_window"
            window = _window(field, self.max_attention_window)
            asked.add(field, "max_attention_window", window, is_default=False)
        return asked


@dataclass(frozen=True)
class GuidedDecodingConfig:
    """Backend of guided decoding: LLGUIDANCE or XGRAMMAR. The server reads the tokenizer and its stop ids
    from the model's files, so fields for them have to be empty.
    """

    backend: str | Enum = "LLGUIDANCE"
    encoded_vocab: Any = None
    tokenizer_str: Any = None
    stop_token_ids: Any = None

    def checked_backend(self, field: str) -> str:
        """Return the value of the setting grammar_backend. Raises ConfigError."""
        for name in ("encoded_vocab", "tokenizer_str", "stop_token_ids"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{field}.{name}: the model's files say it; leave it out")
        backend = _name(self.backend)
        if backend not in ("LLGUIDANCE", "XGRAMMAR"):
            raise ConfigError(
                f"{field}.backend: LLGUIDANCE and XGRAMMAR are what is built, got {self.backend!r}"
            )
        return backend.lower()


@dataclass(frozen=True, slots=True)
class AdditionalModelOutput:
    """One additional output, by its name in docs/additional_outputs.md."""

    name: str
    gather_context: bool = False
    """True to return rows of the prompt, too."""


def checked_outputs(value: Any) -> tuple[AdditionalModelOutput, ...]:
    """Return additional_model_outputs, a list of AdditionalModelOutput, as a tuple. Raises InvalidRequest for
    other objects.
    """
    if not isinstance(value, Sequence) or not all(isinstance(each, AdditionalModelOutput) for each in value):
        raise InvalidRequest(
            "additional_model_outputs must be a list of carousel.AdditionalModelOutput",
            param="additional_model_outputs",
        )
    return tuple(value)


@dataclass(slots=True, kw_only=True)
class PeftCacheConfig:
    """Sizes of the caches of LoRA adapters; giving it enables LoRA. A row is one rank of one module in one
    layer.
    """

    num_host_module_layer: int = 0
    """Rows of weights that came with requests. It takes precedence over host_cache_size."""
    num_device_module_layer: int = 0
    """Rows on the device. It takes precedence over device_cache_percent."""
    optimal_adapter_size: int = 8
    """Rank of an adapter that takes one page if it has all modules."""
    max_adapter_size: int = 64
    """Largest rank of an adapter; adapters with a larger one are refused."""
    num_put_workers: int = 1
    """Number of tokenizer processes, which receive the weights that come with requests."""
    num_ensure_workers: int = 1
    """Number of threads that load adapters to the device."""
    num_copy_streams: int = 1
    """Number of copy streams: only 1 is supported."""
    max_pages_per_block_host: int = 24
    """No effect: weights on the host are files, and those on the device are allocated layer by layer, not by
    blocks.
    """
    max_pages_per_block_device: int = 24
    device_cache_percent: float | None = None
    """Share of the memory left beside weights and KV cache. None: room for max_loras adapters of the largest
    rank.
    """
    host_cache_size: int | None = None
    """Bytes for weights that came with requests; None is 1 GiB."""

    def asked(self) -> AskedSettings:
        """Return the settings for this object. Raises ConfigError."""
        unbuilt = {
            "num_copy_streams": (1,),
            "max_pages_per_block_host": (24,),
            "max_pages_per_block_device": (24, 8),
        }
        _refuse_unbuilt(self, "peft_cache_config", unbuilt)
        asked = nothing_asked()
        asked.add("peft_cache_config", "enable_lora", True, is_default=False)
        for name, (setting, default, least) in PEFT_COUNTS.items():
            field, value = f"peft_cache_config.{name}", getattr(self, name)
            if value is not None:
                asked.add(field, setting, _count(field, value, least=least), is_default=value == default)
        if self.device_cache_percent is not None:
            field = "peft_cache_config.device_cache_percent"
            value = _fraction(field, self.device_cache_percent)
            asked.add(field, "lora_device_percent", value, is_default=False)
        return asked


PEFT_COUNTS = {
    "num_host_module_layer": ("lora_host_rows", 0, 0),
    "num_device_module_layer": ("lora_device_rows", 0, 0),
    "optimal_adapter_size": ("lora_page_rank", 8, 1),
    "max_adapter_size": ("max_lora_rank", 64, 1),
    "num_put_workers": ("tokenizer_workers", 1, 1),
    "num_ensure_workers": ("lora_load_workers", 1, 1),
    "host_cache_size": ("lora_host_cache_size", 1 << 30, 1),
}
"""Fields of PeftCacheConfig -> setting, default, and least value."""


@dataclass(slots=True, kw_only=True)
class ExecutorConfig:
    """Configuration of an executor, with TensorRT-LLM's defaults."""

    max_beam_width: int = 1
    """Maximum number of beams of a beam search."""
    scheduler_config: SchedulerConfig | None = None
    """Capacity policy; None is SchedulerConfig(), or STATIC_BATCH with static batching."""
    kv_cache_config: KvCacheConfig | None = None
    """Size of the KV cache; None is KvCacheConfig()."""
    enable_chunked_context: bool = True
    """True to compute prompts in chunks. False: each prompt is computed whole, in one step, and one of more
    than max_num_tokens is refused.
    """
    normalize_log_probs: bool = True
    """No effect: logprobs are over the whole vocabulary with either value, also those of beams."""
    iter_stats_max_iterations: int = 1000
    request_stats_max_iterations: int = 0
    batching_type: str | Enum = "INFLIGHT"
    """Batching type, INFLIGHT or STATIC."""
    max_batch_size: int | None = None
    """Maximum number of sequences that run at the same time (max_running_requests)."""
    max_num_tokens: int | None = None
    """Maximum number of tokens computed in one step (chunked_prefill_size)."""
    max_queue_size: int | None = None
    """Maximum number of waiting requests; more are refused."""
    gather_generation_logits: bool = False
    guided_decoding_config: GuidedDecodingConfig | None = None
    """Backend of guided decoding. Guides also work without it."""
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    """Additional outputs that requests may ask for (additional_output)."""
    peft_cache_config: PeftCacheConfig | None = None
    """Sizes of the caches of LoRA adapters; giving it enables LoRA."""
    parallel_config: Any = None
    """Unsupported, like the fields below: refused unless it is neutral."""
    logits_post_processor_config: Any = None
    decoding_config: Any = None
    use_gpu_direct_storage: bool = False
    gpu_weights_percent: float = 1.0
    extended_runtime_perf_knob_config: Any = None
    debug_config: Any = None
    recv_poll_period_ms: int = 0
    max_seq_idle_microseconds: int = 180_000_000
    spec_dec_config: Any = None
    cache_transceiver_config: Any = None
    prompt_table_offloading: bool = False
    enable_trt_overlap: bool = False
    fail_fast_on_attention_window_too_large: bool = False

    def asked(self) -> AskedSettings:
        """Return the settings for this object. Raises ConfigError."""
        _refuse_unbuilt(self, "executor_config", UNBUILT)
        asked = nothing_asked()
        batching = _name(self.batching_type)
        if batching not in BATCHING_TYPES:
            raise ConfigError(
                f"executor_config.batching_type: {' or '.join(BATCHING_TYPES)}, got {self.batching_type!r}"
            )
        asked.add(
            "executor_config.batching_type",
            "batching_type",
            BATCHING_TYPES[batching],
            is_default=batching == "INFLIGHT",
        )
        if self.scheduler_config is not None or batching == "INFLIGHT":
            asked.extend(asked_of("scheduler_config", self.scheduler_config or SchedulerConfig()))
        asked.extend(asked_of("kv_cache_config", self.kv_cache_config or KvCacheConfig()))
        if self.peft_cache_config is not None:
            asked.extend(asked_of("peft_cache_config", self.peft_cache_config))
        self._add_guides(asked)
        self._add_outputs(asked)
        self._add_flags(asked)
        self._add_counts(asked)
        return asked

    def _add_guides(self, asked: AskedSettings) -> None:
        config, field = self.guided_decoding_config, "executor_config.guided_decoding_config"
        if config is None:
            return
        if not isinstance(config, GuidedDecodingConfig):
            raise ConfigError(f"{field}: a carousel.GuidedDecodingConfig, got {type(config).__name__}")
        asked.add(field, "grammar_backend", config.checked_backend(field), is_default=False)

    def _add_outputs(self, asked: AskedSettings) -> None:
        field = "executor_config.additional_model_outputs"
        try:
            names = [each.name for each in checked_outputs(self.additional_model_outputs or ())]
        except InvalidRequest as error:
            raise ConfigError(f"executor_config.{error.message}") from None
        if names:
            asked.add(field, "additional_output", ",".join(names), is_default=False)

    def _add_flags(self, asked: AskedSettings) -> None:
        _check_bool("executor_config.normalize_log_probs", self.normalize_log_probs)
        for name, default in (("enable_chunked_context", True), ("gather_generation_logits", False)):
            value = getattr(self, name)
            _check_bool(f"executor_config.{name}", value)
            asked.add(f"executor_config.{name}", name, value, is_default=value is default)

    def _add_counts(self, asked: AskedSettings) -> None:
        asked.add("executor_config", "beam_batching", "drain", is_default=True)
        asked.add("executor_config", "beam_defaults", "trtllm", is_default=True)
        field, width = "executor_config.max_beam_width", self.max_beam_width
        asked.add(field, "max_beam_width", _count(field, width), is_default=width == 1)
        for name, setting in COUNTS.items():
            value = getattr(self, name)
            if value is not None:
                field = f"executor_config.{name}"
                asked.add(field, setting, _count(field, value), is_default=False)
        for name, default in (("iter_stats_max_iterations", 1000), ("request_stats_max_iterations", 0)):
            value = getattr(self, name)
            field = f"executor_config.{name}"
            asked.add(field, name, _count(field, value, least=0), is_default=value == default)


COUNTS = {
    "max_batch_size": "max_running_requests",
    "max_num_tokens": "chunked_prefill_size",
    "max_queue_size": "max_queued_requests",
}
"""Fields of ExecutorConfig -> setting."""
UNBUILT: dict[str, tuple[Any, ...]] = {
    "parallel_config": (None,),
    "logits_post_processor_config": (None,),
    "decoding_config": (None,),
    "use_gpu_direct_storage": (False,),
    "gpu_weights_percent": (1.0,),
    "extended_runtime_perf_knob_config": (None,),
    "debug_config": (None,),
    "recv_poll_period_ms": (0,),
    "max_seq_idle_microseconds": (180_000_000,),
    "spec_dec_config": (None,),
    "cache_transceiver_config": (None,),
    "prompt_table_offloading": (False,),
    "enable_trt_overlap": (False,),
    "fail_fast_on_attention_window_too_large": (False,),
}
"""Values of fields of ExecutorConfig that leave an unsupported feature off."""
CONFIGS: dict[str, type[ExecutorConfig | SchedulerConfig | KvCacheConfig | PeftCacheConfig]] = {
    "executor_config": ExecutorConfig,
    "scheduler_config": SchedulerConfig,
    "kv_cache_config": KvCacheConfig,
    "peft_cache_config": PeftCacheConfig,
}
"""Arguments of `GenerationExecutor.create` that are configuration objects."""


def asked_of(name: str, config: Any) -> AskedSettings:
    """Return the settings for the configuration object in the argument `name`. Raises ConfigError."""
    if not isinstance(config, CONFIGS[name]):
        raise ConfigError(f"{name}: a carousel.{CONFIGS[name].__name__}, got {type(config).__name__}")
    return config.asked()


def without_configs(given: Mapping[str, Any]) -> tuple[dict[str, Any], AskedSettings]:
    """Return the other arguments, and the settings for the configuration objects. Raises ConfigError."""
    asked = nothing_asked()
    if given.get("executor_config") is not None:
        for name in ("scheduler_config", "kv_cache_config", "peft_cache_config"):
            if given.get(name) is not None:
                raise ConfigError(f"{name}: give it as a field of executor_config, which is given, too")
    for name in CONFIGS:
        if given.get(name) is not None:
            asked.extend(asked_of(name, given[name]))
    return {name: value for name, value in given.items() if name not in CONFIGS}, asked


def _refuse_unbuilt(config: object, where: str, unbuilt: Mapping[str, tuple[Any, ...]]) -> None:
    for name, neutral in unbuilt.items():
        value = getattr(config, name)
        if not any(_is_same(value, each) for each in neutral):
            raise ConfigError(f"{where}.{name}: {value!r} is not supported; leave it at {neutral[0]}")


def _is_same(value: object, neutral: object) -> bool:
    """Return True if the values are equal and either both or neither are bool."""
    if isinstance(neutral, bool) or isinstance(value, bool) or neutral is None:
        return value is neutral
    return bool(value == neutral)


def _name(value: object) -> str | None:
    """Return the name of a member of any enum, or a string in upper case; None for None, and the repr of any
    other value.
    """
    if isinstance(value, Enum):
        return value.name
    name = getattr(value, "name", value)  # members of a compiled library's enum are of no class of Python's
    return name.upper() if isinstance(name, str) else None if value is None else repr(value)


def _capacity_scheduler(field: str, value: object) -> str:
    if isinstance(value, str) and ":" in value:
        return value
    name = _name(value)
    if name is None or name not in CapacitySchedulerPolicy.__members__:
        known = ", ".join(CapacitySchedulerPolicy.__members__)
        raise ConfigError(f"{field}: {known}, or your own as package.module:Class, got {value!r}")
    return str(CapacitySchedulerPolicy[name].value)


def _check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{field}: true or false, got {value!r}")


def _count(field: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INT32:
        raise ConfigError(f"{field}: an integer from {least} on, got {value!r}")
    return value


def _fraction(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"{field}: a number between 0 and 1, got {value!r}")
    return float(value)


def _window(field: str, value: object) -> int:
    windows = set(_each_window(field, value))
    if len(windows) != 1:
        raise ConfigError(f"{field}: {value!r} differs from layer to layer; only one for all is built")
    return windows.pop()


def _each_window(field: str, value: object) -> Iterator[int]:
    for each in value if isinstance(value, list | tuple) else [value]:
        yield _count(field, each)


DRAFTS = "external_draft_tokens_config"


class ExternalDraftTokensConfig:
    """Draft tokens: guesses at the beginning of the output. One step computes all that are right. They do not
    change tokens, logprobs or text.
    """

    def __init__(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any],
        draft_logits: Any = None,
        acceptance_threshold: float | None = None,
        fast_logits: bool | None = None,
    ) -> None:
        """Copy the tokens. Raises InvalidRequest for no tokens, for too many, and for arguments with which a
        guess would be accepted that is not the sampled token.
        """
        for name, value in (("draft_logits", draft_logits), ("acceptance_threshold", acceptance_threshold)):
            if value is not None:
                raise InvalidRequest(
                    f"{DRAFTS}.{name} is not supported: a guess counts where it is the token that is sampled,"
                    " so that the output is the same as without it",
                    param=f"{DRAFTS}.{name}",
                )
        if fast_logits:
            raise InvalidRequest(
                f"{DRAFTS}.fast_logits is not supported: logits of a draft model are not taken",
                param=f"{DRAFTS}.fast_logits",
            )
        if hasattr(tokens, "tolist"):
            tokens = tokens.tolist()
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes) or not tokens:
            raise InvalidRequest(
                f"{DRAFTS}.tokens must be token ids, and not empty", param=f"{DRAFTS}.tokens"
            )
        if len(tokens) > MAX_DRAFT_TOKENS:
            raise InvalidRequest(
                f"{DRAFTS}.tokens: {len(tokens)} tokens; at most {MAX_DRAFT_TOKENS} are verified",
                param=f"{DRAFTS}.tokens",
            )
        self.tokens = list(tokens)
