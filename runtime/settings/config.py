"""RuntimeConfig: every setting of a launch, in one frozen struct; the command line is generated from it.

They are declared by subject, in `model_settings`, `engine_settings` and `server_settings`: the settings of a
subject are a struct that adds them to those of the subjects before, as a msgspec struct has one base.
`runtime.launcher.resolved_config` fills in what depends on the model or the machine, once, in the launcher;
the other processes read the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from os.path import expanduser
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from runtime.base.errors import ConfigError
from runtime.settings.server_settings import LaunchSettings

DEMO_MODEL = (Path(__file__).resolve().parents[2] / "carousel" / "demo_model").resolve()
"""The model that is installed with the project; in its source a link to demo/model."""

MAX_NAME_CHARS = 256
"""Maximum number of characters of a logits processor's name, which requests use."""


@lru_cache(maxsize=16)
def _names_in(text: str) -> tuple[str, ...]:
    """Return the names between commas. Cached, because each request asks for the model's names."""
    names = [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(filter(None, names))) or ("",)


class RuntimeConfig(LaunchSettings, frozen=True, forbid_unknown_fields=True):
    """Settings as given. `auto`, None and 0 stand for values that `resolve` fills in."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which requests may ask for the model. Replies use the first."""
        return _names_in(self.served_model_name)

    @property
    def template_defaults(self) -> dict[str, Any]:
        """Chat template variables of conversations that do not give them. Raises ConfigError."""
        if not self.default_chat_template_kwargs:
            return {}
        try:
            return msgspec.json.decode(self.default_chat_template_kwargs, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"default_chat_template_kwargs: expected a JSON object: {error}") from None

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Directories of the adapters of --lora-modules by name. Raises ConfigError."""
        paths: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in self.lora_modules.split(","))):
            name, equals, path = part.partition("=")
            if not (equals and name and path) or "/" in name:
                raise ConfigError(f"lora_modules: {part!r} is not like name=path, with no slash in the name")
            if name in paths or name in self.model_names:
                taken = "an adapter" if name in paths else "the model"
                raise ConfigError(f"lora_modules: {name} is already the name of {taken}")
            paths[name] = path
        return paths

    @property
    def logits_processor_paths(self) -> dict[str, str]:
        """Classes of --logits-processor (`module:Class`) by name. Raises ConfigError."""
        paths: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in self.logits_processor.split(","))):
            name, equals, path = part.partition("=")
            if not (equals and name and all(path.partition(":"))) or len(name) > MAX_NAME_CHARS:
                raise ConfigError(f"logits_processor: {part!r} is not like name=package.module:Class")
            if name in paths:
                raise ConfigError(f"logits_processor: {name} is given twice")
            paths[name] = path
        return paths

    @property
    def additional_outputs(self) -> tuple[str, ...]:
        """Names of --additional-output."""
        names = (name.strip() for name in self.additional_output.split(","))
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def max_waiting(self) -> int:
        return self.max_queued_requests or 4 * self.max_running_requests

    @property
    def has_api_keys(self) -> bool:
        """True if the HTTP server asks for an API key."""
        return bool(self.api_key or self.api_key_file or self.api_keys)

    @property
    def may_have_tenants(self) -> bool:
        """True if there may be several keys, now or when they are read again."""
        return bool(self.api_keys or self.curve_dir or "," in (self.api_key or ""))

    @property
    def has_key_files(self) -> bool:
        """True if keys are read from files, which SIGHUP reads again."""
        return bool(self.api_key_file or self.api_keys)

    @property
    def max_waiting_of_client(self) -> int:
        """Number of the `max_waiting` places that one client may have while other clients are connected but
        have nothing waiting.
        """
        share = self.max_queued_requests_per_client or (3 * self.max_waiting + 3) // 4
        return min(share, self.max_waiting)

    @property
    def max_waiting_of_lone_client(self) -> int:
        """Number of the `max_waiting` places that the only connected client may have: all, unless a limit was
        set.
        """
        return self.max_waiting_of_client if self.max_queued_requests_per_client else self.max_waiting

    @property
    def max_prompt_len(self) -> int | None:
        """Maximum number of tokens of a prompt, if prompts are computed in one step; None: they may be
        computed in chunks.
        """
        return self.chunked_prefill_size if self.disable_chunked_prefill else None

    @property
    def batching(self) -> str:
        """Name of the batching type."""
        return BATCHING_SPELLINGS.get(self.batching_type, self.batching_type)

    @property
    def capacity_policy(self) -> str:
        """Name of the capacity policy, or package.module:Class of the user's own."""
        if self.capacity_scheduler == "auto":
            return "static_batch" if self.batching == "static" else "max_utilization"
        return self.capacity_scheduler if ":" in self.capacity_scheduler else self.capacity_scheduler.lower()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the model, over all pipeline stages."""
        return self.tp_size * self.pp_size

    @property
    def answering_rank(self) -> int:
        """Rank that samples and answers the scheduler: the first one of the last stage."""
        return self.num_ranks - self.tp_size

    @property
    def answers_here(self) -> bool:
        """True if the answering rank is on node 0, where the scheduler is."""
        return self.node_of_rank(self.answering_rank) == 0

    @property
    def max_steps_in_flight(self) -> int:
        """Number of steps launched before one must be committed: one for each pipeline stage and, with
        overlap, one more that is ready when the first stage is.
        """
        return self.pp_size + (not self.disable_overlap_schedule)

    @property
    def num_processes(self) -> dict[str, int]:
        """Number of processes of each role that can have several."""
        return {
            "worker": self.num_ranks,
            "tokenizer": self.tokenizer_workers,
            "detokenizer": self.detokenizer_workers,
            "api": self.api_workers,
            "grammar": 0 if self.grammar_backend == "none" else 1,
        }

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each machine."""
        return self.num_ranks // self.nnodes

    def node_of_rank(self, rank: int) -> int:
        """Return the node that a rank is on. The first node has the first ranks."""
        return rank // self.ranks_per_node

    def http_url(self, port: int) -> str:
        """Return the URL of the HTTP server that listens on this port."""
        scheme = "https" if self.ssl_certfile else "http"
        return f"{scheme}://[{self.host}]:{port}" if ":" in self.host else f"{scheme}://{self.host}:{port}"

    @property
    def origins(self) -> list[str]:
        """Web origins whose pages may call the HTTP server."""
        return [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]

    @property
    def host_names(self) -> list[str]:
        """Host names of the HTTP server, in addition to those that every server accepts."""
        return [name.strip() for name in self.allowed_hosts.split(",") if name.strip()]

    @property
    def checks_web_origin(self) -> bool:
        """True if the HTTP server checks Host and Origin. With an API key it only does so if names were
        given, because no browser sends a key by itself.
        """
        return not self.has_api_keys or bool(self.host_names)

    @property
    def proxies(self) -> list[str]:
        """Proxies whose forwarding headers are believed."""
        return [proxy.strip() for proxy in self.forwarded_allow_ips.split(",") if proxy.strip()]


PRESETS: dict[str, dict[str, Any]] = {
    "trtllm": {
        "beam_batching": "drain",
        "beam_defaults": "trtllm",
        "capacity_scheduler": "guaranteed_no_evict",
        "chunked_prefill_size": 8192,
        "disable_chunked_prefill": True,
        "disable_radix_cache": True,
        "mem_fraction_static": 0.9,
    },
}
"""Settings of each preset, which make the server behave as the one it is named after."""
BATCHING_SPELLINGS = {
    "InflightFusedBatching": "inflight_fused",
    "InflightBatching": "inflight",
    "V1": "static",
}


def preset_values(preset: str, batching_type: str) -> dict[str, Any]:
    """Return the settings of a preset, without the capacity scheduler where static batching decides it."""
    values = dict(PRESETS[preset])
    if BATCHING_SPELLINGS.get(batching_type, batching_type) == "static":
        del values["capacity_scheduler"]
    return values


def from_values(values: dict[str, Any], given_as: Mapping[str, str] | None = None) -> RuntimeConfig:
    """Make a RuntimeConfig from settings by name. given_as: the caller's own names of settings, for errors.
    Raises ConfigError, which names the setting.
    """
    values = {name: _at_home(name, value) for name, value in values.items()}
    try:
        return msgspec.convert(values, RuntimeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_named(str(error), values, given_as or {})) from None


def _at_home(name: str, value: Any) -> Any:
    """Return a value with the home directory for a ~ at the beginning of a path, which a shell leaves as it
    is behind an equals sign, and Python and YAML everywhere.
    """
    if not isinstance(value, str):
        return value
    if name == "lora_modules":
        parts = [part.partition("=") for part in value.split(",")]
        return ",".join(f"{part}{equals}{expanduser(path)}" for part, equals, path in parts)
    # A user that does not exist is left to the error about the path.
    return expanduser(value) if name in PATHS else value


def refuse_empty(name: str, text: str) -> None:
    """Raise ConfigError for an empty value, such as "$KEY" in a script while KEY is not set. It would mean
    the default, which may be no protection.
    """
    if not text.strip():
        raise ConfigError(f"{name}: the value is empty; is a variable unset? For the default leave it out")


def setting_of(name: str) -> str:
    """Return the setting for a name that Python callers use: its own name, or another spelling of its flag
    such as `max_model_len`. Any other name is returned unchanged.
    """
    return _SPELLINGS.get(name, name)


_HINTS = get_type_hints(RuntimeConfig, include_extras=True)
SETTINGS: dict[str, tuple[Any, Meta]] = {
    name: get_args(_HINTS[name]) for name in RuntimeConfig.__struct_fields__
}
"""Each setting by name, with its type and description."""


def _titles() -> dict[str, str]:
    titles = {}
    for subject in reversed(RuntimeConfig.__mro__):
        own = vars(subject)
        if "TITLE" in own:
            first = next(name for name in own["__annotations__"] if name in SETTINGS)
            titles[first] = own["TITLE"]
    return titles


TITLES = _titles()
"""Titles of the help text, by the first setting of each subject."""
LISTS = (
    "allowed_hosts",
    "api_key",
    "cors_origins",
    "cuda_graph_bs",
    "forwarded_allow_ips",
    "logits_processor",
    "lora_modules",
    "served_model_name",
)
"""Settings whose parts are separated by commas here; in a command line and in keywords they may be a list."""

REPEATABLE = frozenset({"logits_processor"})
"""Settings that a command line may give several times, all of which count."""

PATHS = (
    *("model", "tokenizer", "chat_template", "lora_dir", "node_key", "api_key_file", "api_keys"),
    *("ssl_certfile", "ssl_keyfile", "curve_dir", "profile_dir", "run_dir", "weights_dir"),
)
"""Settings that are a path, or a name on the Hub."""


def flags_of(name: str) -> tuple[str, ...]:
    """Return the other spellings of a setting on the command line."""
    extra = SETTINGS[name][1].extra
    assert extra is not None
    flags: tuple[str, ...] = extra["flags"]
    return flags


_SPELLINGS = {flag.removeprefix("--").replace("-", "_"): name for name in SETTINGS for flag in flags_of(name)}


def _named(problem: str, values: dict[str, Any], given_as: Mapping[str, str]) -> str:
    """Return msgspec's message for a wrong value, with the setting's name and the value added."""
    if match := re.fullmatch(r"Invalid enum value .* - at `\$\.(\w+)`", problem, re.DOTALL):
        name = match[1]
        known = ", ".join(get_args(SETTINGS[name][0]))
        return f"{given_as.get(name, name)}: {values[name]!r} is unknown; known: {known}"
    match = re.fullmatch(r"Expected (.*) - at `\$\.(\w+)`", problem)
    if match is None:
        return problem
    expected, name = match[1].replace("`", ""), match[2]
    return f"{given_as.get(name, name)}: expected {expected.split(', got')[0]}, got {values[name]!r}"
