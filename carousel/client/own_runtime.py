"""OwnRuntime: a runtime that serves this process alone, its child, and what it says while it starts."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from runtime.base.environment import child_environment
from runtime.base.errors import ConfigError, StartError
from runtime.ring.endpoints import Endpoints
from runtime.settings import peer_flag as peers
from runtime.settings.config import (
    PRESETS,
    RuntimeConfig,
    flags_of,
    from_values,
    refuse_empty,
    setting_of,
)
from runtime.settings.peer_flags import PEER_FLAGS, peer_flag, value_of

logger = logging.getLogger(__name__)

POLL_S = 0.05
STOP_TIMEOUT_S = 10.0
MAX_QUEUED = 1 << 20
"""Nobody else shares this runtime, so it queues whatever its one caller has."""
DEFAULTS = {
    "max_queued_requests": MAX_QUEUED,
    "max_queued_requests_per_client": MAX_QUEUED,
    "queue_timeout": 0.0,
    "log_level": "warning",
}
"""Settings that are so here, unless the caller says something else."""
OWN_SETTINGS = frozenset(
    {
        "allowed_hosts",
        "api_key",
        "api_key_file",
        "api_keys",
        "api_workers",
        "cache_salt_per_api_key",
        "default_max_tokens",
        "drain_timeout",
        "cors_origins",
        "forwarded_allow_ips",
        "host",
        "log_level_http",
        "max_connections",
        "max_connections_per_address",
        "metrics_open",
        "no_http",
        "parent_pid",
        "port",
        "root_path",
        "run_dir",
        "sampling_defaults",
        "share_prefixes_across_keys",
        "ssl_certfile",
        "ssl_keyfile",
        "unknown_fields",
    }
)
"""Settings that make no sense here: there is no HTTP server, and the directory and the parent are ours."""
LLM_SETTINGS = frozenset(RuntimeConfig.__struct_fields__) - OWN_SETTINGS
PEER_KEYWORDS = {
    "generation_config": peers.value(
        "--generation-config",
        taken="what SamplingParams leave out is neutral here",
        neutral=("vllm",),
        refused="what a model's generation_config.json recommends is for HTTP alone; give SamplingParams",
    ),
    "disable_uvicorn_access_log": peers.switch(
        "--disable-uvicorn-access-log", taken="there is no HTTP server"
    ),
}
"""Flags of vLLM that stand for settings of the HTTP server elsewhere."""
NEAR = 0.75
"""How alike an unknown keyword and the one that is meant are, of 1; arbitrary, as that of options."""


class OwnRuntime:
    """A runtime that serves this process alone: the child process that is its launcher, and its words."""

    def __init__(self, model: str | Path, settings: dict[str, Any]) -> None:
        """Start it. Raises ConfigError, before anything is started, for an unknown or wrong setting."""
        flags = _flags({**given_settings(settings, DEFAULTS), "model": model})
        self.run_dir = Path(tempfile.mkdtemp(prefix="carousel-llm-"))
        self._owner_pid = os.getpid()
        self._state_file = Endpoints(self.run_dir).state_file
        self._last_lines: deque[str] = deque(maxlen=20)
        # Its own session: Ctrl-C is for this process, which then decides what becomes of its runtime.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "runtime.launcher.main"),
                *flags,
                "--no-http",
                f"--run-dir={self.run_dir}",
                f"--parent-pid={os.getpid()}",
                "--drain-timeout=0",  # whoever stops it is its only caller
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=child_environment(),
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(
            target=_relay, args=(self._process.stderr, self._last_lines), name="carousel-log", daemon=True
        )
        self._reader.start()

    def wait_ready(self) -> None:
        """The launcher limits the time. Raises StartError when it gives up."""
        while self._state() != "ready":
            if self._process.poll() is not None:
                self._reader.join(STOP_TIMEOUT_S)
                error = StartError(self._last_words())
                error.exit_code = self._process.returncode
                raise error
            time.sleep(POLL_S)

    def _state(self) -> Any:
        try:
            return msgspec.json.decode(self._state_file.read_bytes())["state"]
        except FileNotFoundError:
            return "absent"

    def _last_words(self) -> str:
        said = [line for line in self._last_lines if line.startswith("error: ")] or list(self._last_lines)
        reason = (
            said[-1].removeprefix("error: ") if said else f"it ended with code {self._process.returncode}"
        )
        return f"the runtime could not start: {reason}"

    def stop(self) -> None:
        """End it and remove its files. Idempotent."""
        if os.getpid() != self._owner_pid:
            return  # a forked child has a copy of the object, but the runtime is its parent's
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        shutil.rmtree(self.run_dir, ignore_errors=True)


def _relay(source: BinaryIO, last_lines: deque[str]) -> None:
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            last_lines.append(text)
            print(text, file=sys.stderr, flush=True)


def given_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings over these defaults. One that is None is not given, as with vLLM, whose own
    defaults are None; an unknown one stays, to be refused.
    """
    given = {name: value for name, value in settings.items() if value is not None or not _is_known(name)}
    return {**defaults, **given}


def _is_known(spelling: str) -> bool:
    return any(name in LLM_SETTINGS for name in (setting_of(spelling), setting_of(f"no_{spelling}"))) or (
        peer_flag("--" + spelling.replace("_", "-")) is not None
    )


def _meaning(spelling: str, value: Any) -> Mapping[str, Any]:
    """The settings that a keyword stands for: our own, or a flag of vLLM's or SGLang's with underscores.

    Raises ConfigError for one of theirs that cannot be had.
    """
    name = setting_of(spelling)
    if (
        off := setting_of(f"no_{spelling}")
    ) in LLM_SETTINGS:  # enable_prefix_caching, whose opposite is a flag
        if not isinstance(value, bool):
            raise ConfigError(f"{spelling}: expected bool, got {value!r}")
        return {off: not value}
    flag = PEER_KEYWORDS.get(spelling) or peer_flag("--" + spelling.replace("_", "-"))
    if flag is not None and name not in RuntimeConfig.__struct_fields__:
        meaning = flag.meaning(spelling, str(value))
    elif isinstance(value, str):
        meaning = value_of(name, spelling, value)
    else:
        return {name: value}
    if meaning.note:
        logger.info("%s=%r: nothing changes: %s", spelling, value, meaning.note)
    return meaning.settings


def _flags(settings: dict[str, Any]) -> list[str]:
    """Settings as a command line. Raises ConfigError that names a wrong one."""
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    preset = settings.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise ConfigError(f"preset: {preset!r} is unknown; known: {', '.join(PRESETS)}")
    for spelling, value in given_settings(settings, {}).items():
        if spelling == "preset":
            continue
        if isinstance(value, str) and spelling != "model":  # whose empty text is LLM's own default
            refuse_empty(spelling, value)
        for name, meant in _meaning(spelling, value).items():
            if name not in LLM_SETTINGS:
                raise ConfigError(_unknown(spelling))
            if name in values:
                raise ConfigError(f"{spelling}: {name} is given twice, under two names; give one of them")
            if isinstance(meant, dict) and name in ("hf_overrides", "rope_scaling"):
                meant = msgspec.json.encode(meant).decode()
            values[name] = str(meant) if isinstance(meant, Path) else meant
            given_as[name] = spelling
    if preset is not None:
        values = PRESETS[preset] | values  # so that what the caller says wins
    config = from_values(values, given_as)
    flags = []
    for name in values:
        value = getattr(config, name)
        if value == RuntimeConfig.__struct_defaults__[RuntimeConfig.__struct_fields__.index(name)]:
            continue
        flag = "--" + name.replace("_", "-")
        flags.append(flag if value is True else f"{flag}={value}")
    return flags


def _unknown(spelling: str) -> str:
    """Return the error for a keyword that is no setting here."""
    known = ", ".join(sorted(LLM_SETTINGS))
    theirs = {name for flag in PEER_FLAGS if flag.understood or flag.taken for name in flag.names}
    options = theirs.union(*map(flags_of, LLM_SETTINGS))
    keywords = {option[2:].replace("-", "_") for option in options if option.startswith("--")} | LLM_SETTINGS
    near = get_close_matches(spelling, sorted(keywords), n=1, cutoff=NEAR)
    if near and spelling not in OWN_SETTINGS:
        return f"{spelling} is not a setting of LLM; did you mean {near[0]}? Known: {known}"
    return f"{spelling} is not a setting of LLM; known: {known}"
