"""Checks of the settings of `runtime.settings.server_settings`: HTTP, TLS, keys, TCP, traces, restarts."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from importlib.util import find_spec
from pathlib import Path

import msgspec

from runtime.base.environment import api_key
from runtime.base.errors import ConfigError
from runtime.ring.endpoints import tcp_endpoints
from runtime.ring.tenants import read_tenants
from runtime.settings.config import RuntimeConfig
from runtime.settings.server_settings import HTTP_SETTINGS

HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
KEY_FILES = ("api_key_file", "api_keys")
"""Settings of the HTTP server that also matter to clients over TCP: these have sections in the files, and
SIGHUP reloads them.
"""
OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
OWN_PATHS = ("/profiles", "/stats", "/timelines", "/v1", "/v1/chat", "/v1/messages", "/v1/models", "/v2")
"""Beginnings of the HTTP server's own paths. As a root path they would be stripped from these."""
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")


def check_server_settings(config: RuntimeConfig) -> None:
    """Raise ConfigError for settings that contradict each other or would have no effect."""
    _check_http(config)
    _check_tls(config)
    _check_tcp(config)
    _check_api_keys(config)
    _check_traces(config)
    _check_profile_dir(config)
    _check_restarts(config)


def with_environment_key(config: RuntimeConfig) -> RuntimeConfig:
    """Return the settings with the key in CAROUSEL_API_KEY, if they name none. Raises ConfigError if the
    variable is set but blank, because its author wants a key.
    """
    key = None if config.has_api_keys else api_key()
    if key is None:
        return config
    if not key.strip() and not config.no_http:
        raise ConfigError(
            "CAROUSEL_API_KEY: the value is empty; set a key, or unset the variable to serve without one"
        )
    return msgspec.structs.replace(config, api_key=key.strip())


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


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


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


def _check_api_keys(config: RuntimeConfig) -> None:
    read_tenants(config)
    for name in ("cache_salt_per_api_key", "share_prefixes_across_keys"):
        if getattr(config, name) and not config.has_api_keys and not config.curve_dir:
            raise ConfigError(f"{name}: without --api-key or --api-keys there are no keys to tell apart")
    if config.share_prefixes_across_keys and config.cache_salt_per_api_key:
        raise ConfigError("cache_salt_per_api_key: share_prefixes_across_keys is the opposite; give one")
    if config.metrics_open and not config.has_api_keys:
        raise ConfigError("metrics_open: without an API key /metrics is open; leave it out")


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


def _check_profile_dir(config: RuntimeConfig) -> None:
    path = config.profile_dir
    if path and not (os.path.isdir(path) and os.access(path, os.W_OK)):
        raise ConfigError(f"profile_dir: {path} is no directory that this user may write to")


def _check_restarts(config: RuntimeConfig) -> None:
    default = RuntimeConfig()
    if config.restart == "never":
        for name in ("max_restarts", "max_engine_restarts", "restart_window"):
            if getattr(config, name) != getattr(default, name):
                raise ConfigError(f"{name}: with --restart never nothing is restarted; leave it out")
