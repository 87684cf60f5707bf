"""Settings of the processes around the engine, and of the launcher."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from runtime.settings.engine_settings import SchedulerSettings
from runtime.settings.setting import setting

HTTP_SETTINGS = (
    "allowed_hosts",
    "api_key",
    "api_workers",
    "cors_origins",
    "default_chat_template_kwargs",
    "default_max_tokens",
    "forwarded_allow_ips",
    "host",
    "log_level_http",
    "max_connections",
    "max_connections_per_address",
    "metrics_names",
    "metrics_open",
    "no_page",
    "otlp_traces_endpoint",
    "root_path",
    "sampling_defaults",
    "sse_keep_alive_interval",
    "ssl_certfile",
    "ssl_keyfile",
    "timeline_sample_rate",
    "trace_content",
    "unknown_fields",
)
"""Settings that only concern the HTTP server."""


class ServerSettings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of HTTP, of the client library's sockets, and of the number of processes."""

    TITLE: ClassVar[str] = "HTTP, client library, logs"

    host: Annotated[str, setting("address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, setting("port of the HTTP server; 0 takes a free one", ge=0, le=65535)] = 30000
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        setting(
            "what a sampling field is that a request over HTTP leaves out: as the model's "
            "generation_config.json recommends, or OpenAI's neutral value"
        ),
    ] = "model"
    api_key: Annotated[
        str,
        setting(
            "require this key (Authorization: Bearer ...), or one of several, separated by commas; also "
            "CAROUSEL_API_KEY; each may do everything"
        ),
    ] = ""
    api_key_file: Annotated[str, setting("file that holds the key, in the place of --api-key")] = ""
    api_keys: Annotated[
        str,
        setting(
            "file of API keys with names, roles and limits, in TOML; read again on SIGHUP (docs/security.md)"
        ),
    ] = ""
    cache_salt_per_api_key: Annotated[
        bool, setting("requests with different API keys share no cached prefixes: the default now")
    ] = False
    share_prefixes_across_keys: Annotated[
        bool,
        setting(
            "requests with different API keys share cached prefixes: one can find out what others ask, and "
            "nobody has a share of the cache"
        ),
    ] = False
    default_max_tokens: Annotated[
        int,
        setting(
            "tokens of an HTTP answer whose request does not say how many; 0: in chat max_new_tokens of the "
            "model's generation_config.json, or else what the context leaves; 16 in completions, 128 in "
            "/generate",
            ge=0,
            le=1 << 22,
        ),
    ] = 0
    default_chat_template_kwargs: Annotated[
        str,
        setting(
            "JSON object of chat template variables, such as enable_thinking, for conversations over HTTP; a "
            "request's chat_template_kwargs and reasoning_effort go before it"
        ),
    ] = ""
    metrics_open: Annotated[bool, setting("answer /metrics without the API key")] = False
    cors_origins: Annotated[
        str,
        setting(
            "origins whose pages may call the HTTP server, separated by commas; * for all; default: none",
            "--allowed-origins",
        ),
    ] = ""
    allowed_hosts: Annotated[
        str,
        setting(
            "names by which the HTTP server may be called, separated by commas, beside IP addresses, names "
            "without dots, the machine's own and those below .localhost, .local and .internal; "
            "*.example.com for all below it, * for all; with an API key and no such list: any "
            "(docs/security.md)"
        ),
    ] = ""
    max_connections: Annotated[
        int,
        setting(
            "connections that each process of the HTTP server has at a time; more wait until one ends",
            ge=1,
            le=1 << 20,
        ),
    ] = 8192
    max_connections_per_address: Annotated[
        int,
        setting(
            "of these, those of one client address; one more is answered with 503 and closed; 0 for any "
            "number, as behind a proxy, where all have the same",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    forwarded_allow_ips: Annotated[
        str,
        setting(
            "addresses or networks of proxies, separated by commas, whose X-Forwarded-For and "
            "X-Forwarded-Proto are believed; * for all; default: none"
        ),
    ] = ""
    root_path: Annotated[
        str,
        setting(
            "beginning of the path, such as /llm, by which a proxy serves this server; requests come with it "
            "or without it"
        ),
    ] = ""
    no_page: Annotated[
        bool, setting("serve no page to browsers: / answers them, too, in JSON (docs/page.md)")
    ] = False
    ssl_certfile: Annotated[
        str,
        setting("serve HTTPS with the certificate in this PEM file, and those above it (docs/security.md)"),
    ] = ""
    ssl_keyfile: Annotated[
        str, setting("PEM file with the certificate's private key; default: it is in ssl_certfile")
    ] = ""
    no_http: Annotated[bool, setting("serve the ZMQ client library only, without an HTTP server")] = False
    zmq_bind: Annotated[
        str,
        setting(
            "serve the client library over TCP too, as tcp://ADDRESS:PORT; the ports after it are used too"
        ),
    ] = ""
    curve_dir: Annotated[
        str,
        setting(
            "directory with server.key_secret and a folder clients/ of the public keys that may connect "
            "over TCP; needed for any address but loopback"
        ),
    ] = ""
    unknown_fields: Annotated[
        Literal["warn", "refuse", "ignore"],
        setting(
            "what becomes of fields of a request that nothing knows: warn serves it and names them in the "
            "header x-carousel-ignored and in the log; refuse answers 400; ignore says nothing "
            "(docs/openai.md)"
        ),
    ] = "warn"
    sse_keep_alive_interval: Annotated[
        float,
        setting(
            "seconds after which a stream over HTTP that has nothing to say gets a line without meaning, so "
            "that proxies keep it open; 0 for none (docs/openai.md)",
            ge=0.0,
            le=86400.0,
        ),
    ] = 30.0
    stream_interval: Annotated[
        int,
        setting(
            "tokens after which a stream is sent again; the first is sent at once, and stop strings end an "
            "output as soon as they are complete",
            ge=1,
            le=1 << 16,
        ),
    ] = 1
    slow_reader_timeout: Annotated[
        float, setting("seconds after which a client that does not read is cut off", gt=0.0, le=86400.0)
    ] = 120.0
    api_workers: Annotated[
        int, setting("processes of the HTTP server", "--api-server-count", "-asc", ge=1, le=64)
    ] = 1
    tokenizer_workers: Annotated[
        int, setting("tokenizer processes", "--tokenizer-worker-num", ge=1, le=64)
    ] = 1
    detokenizer_workers: Annotated[
        int, setting("detokenizer processes", "--detokenizer-worker-num", ge=1, le=64)
    ] = 1
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("how much the processes log")
    ] = "info"
    log_level_http: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        setting(
            "how much the HTTP server logs: to info a line for each request; auto: as log_level",
            "--uvicorn-log-level",
        ),
    ] = "auto"
    log_format: Annotated[
        Literal["text", "json"],
        setting("lines of the log: text, or each an object in JSON (docs/observability.md)"),
    ] = "text"
    metrics_names: Annotated[
        Literal["sglang", "vllm"],
        setting("names in /metrics: SGLang's; vllm adds vLLM's for all that mean the same (docs/metrics.md)"),
    ] = "sglang"
    otlp_traces_endpoint: Annotated[
        str,
        setting(
            "URL of an OpenTelemetry collector that takes traces, such as http://localhost:4318/v1/traces; "
            "needs carousel[otel]; default: what OTEL_EXPORTER_OTLP_* name, else none are sent "
            "(docs/observability.md)"
        ),
    ] = ""
    timeline_sample_rate: Annotated[
        float,
        setting(
            "share of the HTTP requests without a traceparent whose timelines are kept, 0 to 1; one with a "
            "traceparent is sampled as that says (docs/observability.md)",
            ge=0.0,
            le=1.0,
        ),
    ] = 0.0
    trace_content: Annotated[
        bool,
        setting("prompts and outputs go to the collector of traces, too; default: nothing of what they say"),
    ] = False
    profile_dir: Annotated[
        str,
        setting(
            "directory for the step timelines of /start_profile; default: the run directory, which goes with "
            "its launch"
        ),
    ] = ""
    run_dir: Annotated[str, setting("private directory of this launch; default: a new one per launch")] = ""


class LaunchSettings(ServerSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of how the launcher starts, watches, restarts and ends processes."""

    TITLE: ClassVar[str] = "start, restarts, end"

    restart: Annotated[
        Literal["auto", "never"],
        setting("what a process that dies or hangs leads to: auto restarts it, never ends the launch"),
    ] = "auto"
    max_restarts: Annotated[
        int,
        setting("restarts of one process within restart_window; one more ends the launch", ge=0, le=10000),
    ] = 10
    max_engine_restarts: Annotated[
        int,
        setting("the same for the engine: scheduler and workers, restarted as one", ge=0, le=10000),
    ] = 5
    restart_window: Annotated[
        float, setting("seconds after which a restart is forgotten", gt=0.0, le=86400.0)
    ] = 60.0
    stall_timeout: Annotated[
        float,
        setting(
            "seconds without a turn of its work loop after which a process counts as hung and is killed",
            ge=1.0,
            le=86400.0,
        ),
    ] = 30.0
    step_timeout: Annotated[
        float,
        setting(
            "the same for one step of the model; the slowest must fit",
            "--watchdog-timeout",
            ge=1.0,
            le=86400.0,
        ),
    ] = 300.0
    start_timeout: Annotated[
        float, setting("seconds the processes have to get ready", gt=0.0, le=86400.0)
    ] = 600.0
    drain_timeout: Annotated[
        float,
        setting(
            "seconds that running requests have to finish after Ctrl-C or SIGTERM; new ones are refused",
            "--shutdown-timeout",
            ge=0.0,
            le=86400.0,
        ),
    ] = 30.0
    parent_pid: Annotated[int, setting("end when this process ends; 0: do not watch", ge=0)] = 0
