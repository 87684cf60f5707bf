"""The ring around the engine: HTTP, the client library's sockets, how many processes."""

from __future__ import annotations

from typing import Annotated, Literal

from runtime.settings.scheduling import SchedulingSettings
from runtime.settings.setting import setting


class ServingSettings(SchedulingSettings, frozen=True, forbid_unknown_fields=True):
    host: Annotated[str, setting("address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, setting("port of the HTTP server; 0 takes a free one", ge=0, le=65535)] = 30000
    api_key: Annotated[
        str,
        setting(
            "require this key (Authorization: Bearer ...), or one of several, separated by commas; also "
            "CAROUSEL_API_KEY"
        ),
    ] = ""
    cache_salt_per_api_key: Annotated[
        bool, setting("requests with different API keys share no cached prefixes")
    ] = False
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
    slow_reader_timeout: Annotated[
        float, setting("seconds after which a client that does not read is cut off", gt=0.0, le=86400.0)
    ] = 120.0
    api_workers: Annotated[
        int, setting("processes of the HTTP server", "--api-server-count", ge=1, le=64)
    ] = 1
    tokenizer_workers: Annotated[
        int, setting("tokenizer processes", "--tokenizer-worker-num", ge=1, le=64)
    ] = 1
    detokenizer_workers: Annotated[int, setting("detokenizer processes", ge=1, le=64)] = 1
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("how much the processes log")
    ] = "info"
    profile_dir: Annotated[
        str,
        setting(
            "directory for the step timelines of /start_profile; default: the run directory, which goes with "
            "its launch"
        ),
    ] = ""
    run_dir: Annotated[str, setting("private directory of this launch; default: a new one per launch")] = ""
