"""Settings: declared once, checked by name, in the spellings users type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from carousel.server.endpoints import ENDPOINTS
from model_worker.attention import ATTENTION_BACKENDS
from runtime.base import cgroup
from runtime.base.errors import ConfigError
from runtime.launcher.checks.implementations import NAMES
from runtime.launcher.checks.server_settings import OWN_PATHS
from runtime.launcher.command_line import make_parser, parse_args
from runtime.launcher.resolved_config import resolve_config
from runtime.ring.endpoints import tcp_endpoints
from runtime.settings.config import RuntimeConfig, from_values
from scheduler_proc.cache.radix.eviction import EVICTION_POLICIES
from scheduler_proc.capacity import CAPACITY_POLICIES
from scheduler_proc.policy import POLICIES
from tests.harness.cases import for_each
from tests.harness.http.tls import CERTIFICATE, FILES, KEY

ENCRYPTED_KEY = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAgmCZJFpJFA1QICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEASoEEF4IQpppjYU0BZfKDJ0FYnYEgZCd
N/PioAsTyn1j+41VqD+GpwrGRxEzgchrYbontcBSKgaa/G3xzrm8lOsAc6yLL7Ps
bHy2zphQctjl9J17NAIHvovNX+Bs+8Hi4uIElaNHPi7iVpnrHtLhDHYMMKF/O8kW
d+g9a7mLY1JlU/vazTlG5IFW4MyfB5bIVcPiwl2w31ORhsmJp1foOtJZlWbsRwE=
-----END ENCRYPTED PRIVATE KEY-----
"""
"""The key of the tests behind a password."""


def resolved(config: RuntimeConfig, tmp_path: Path) -> RuntimeConfig:
    return resolve_config(config, context_length=2048, dtype="bfloat16", model_path=tmp_path)


def test_an_embedding_model_guesses_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speculative_algorithm: an embedding model generates nothing"):
        resolved(RuntimeConfig(task="embed", speculative_algorithm="NGRAM", pooling="last"), tmp_path)


def test_no_arguments_give_the_declared_defaults() -> None:
    assert parse_args([]) == RuntimeConfig()


@for_each(
    ("argv", "field", "value"),
    [
        (["--model", "m"], "model", "m"),
        (["--model-path", "m"], "model", "m"),
        (["--max-num-seqs", "8"], "max_running_requests", 8),
        (["--max-running-requests", "8"], "max_running_requests", 8),
        (["--block-size", "1"], "page_size", 1),
        (["--max-model-len", "99"], "context_length", 99),
        (["--max-num-batched-tokens", "64"], "chunked_prefill_size", 64),
        (["--gpu-memory-utilization", "0.5"], "mem_fraction_static", 0.5),
        (["--no-enable-prefix-caching"], "disable_radix_cache", True),
        (["--disable-radix-cache"], "disable_radix_cache", True),
        (["--disable-overlap-schedule"], "disable_overlap_schedule", True),
        (["--tensor-parallel-size", "2"], "tp_size", 2),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["--api-server-count", "4"], "api_workers", 4),
        (["--tokenizer-worker-num", "3"], "tokenizer_workers", 3),
        (["--detokenizer-workers", "2"], "detokenizer_workers", 2),
        (["--stream-interval", "4"], "stream_interval", 4),
        (["--max-num-tokens", "64"], "chunked_prefill_size", 64),
        (["--max-batch-size", "8"], "max_batch_size", 8),
        (["--model-type", "InflightBatching"], "batching", "inflight"),
        (["--model-type", "InflightFusedBatching"], "batching", "inflight_fused"),
        (["--batching-type", "static"], "batching", "static"),
        (["--model-type", "V1"], "capacity_policy", "static_batch"),
        ([], "capacity_policy", "max_utilization"),
        (["--capacity-scheduler-policy", "GUARANTEED_NO_EVICT"], "capacity_policy", "guaranteed_no_evict"),
        (["--capacity-scheduler", "My.module:Class"], "capacity_policy", "My.module:Class"),
        (["--preset", "trtllm"], "capacity_policy", "guaranteed_no_evict"),
        (["--preset", "trtllm"], "disable_radix_cache", True),
        (["--preset", "trtllm"], "max_prompt_len", 8192),
        (["--preset", "trtllm", "--model-type", "V1"], "capacity_policy", "static_batch"),
        (["--no-enable-chunked-prefill"], "max_prompt_len", 2048),
        (["--disable-chunked-prefill", "--max-num-tokens", "99"], "max_prompt_len", 99),
        ([], "max_prompt_len", None),
        (["--capacity-scheduler", "static_batch", "--preset", "trtllm"], "capacity_policy", "static_batch"),
    ],
)
def test_spellings_of_other_servers_are_understood(argv: list[str], field: str, value: object) -> None:
    assert getattr(parse_args(argv), field) == value


@for_each(
    ("argv", "named"),
    [
        (["--page-size", "0"], "page_size"),
        (["--page-size", "many"], "page-size"),
        (["--port", "70000"], "port"),
        (["--max-connections", "0"], "max_connections"),
        (["--max-connections-per-address", "-1"], "max_connections_per_address"),
        (["--mem-fraction-static", "0"], "mem_fraction_static"),
        (["--mem-fraction-static", "1.5"], "mem_fraction_static"),
        (["--dtype", "int3"], "dtype"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--api-workers", "0"], "api_workers"),
        (["--tokenizer-workers", "65"], "tokenizer_workers"),
        (["--detokenizer-workers", "0"], "detokenizer_workers"),
        (["--stream-interval", "0"], "stream_interval"),
        (["stray"], "stray"),
        (["--batching-type", "V2"], "batching-type"),
        (["--preset", "other"], "preset"),
    ],
)
def test_bad_setting_is_an_error_that_names_it(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_args(argv)


def test_a_value_out_of_range_is_shown_with_its_range() -> None:
    with pytest.raises(ConfigError, match=r"^port: expected int <= 65535, got 70000$"):
        parse_args(["--port", "70000"])
    with pytest.raises(ConfigError, match=r"^max_running_requests: expected int, got 'many'$"):
        from_values({"max_running_requests": "many"})
    with pytest.raises(ConfigError, match="no_such_name"):
        from_values({"no_such_name": 1})


@for_each("origin", ["foo", "https://a.example/", "a.example", "https://"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cors_origins: "):
        resolved(RuntimeConfig(cors_origins=f"https://b.example:8080, {origin}"), tmp_path)
    assert resolved(RuntimeConfig(cors_origins="*"), tmp_path).origins == ["*"]


@for_each("name", ["http://a.example", "a.example:80", "a*.example", "*.", "a b"])
def test_a_host_that_no_browser_sends_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^allowed_hosts: "):
        resolved(RuntimeConfig(allowed_hosts=f"b.example, *.c.example, {name}"), tmp_path)
    assert resolved(RuntimeConfig(allowed_hosts="*, a.example."), tmp_path).host_names == ["*", "a.example."]


@for_each("given", ["enable_thinking", "[1]", "{a: 1}", '"a"'])
def test_variables_of_a_chat_template_are_a_json_object(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^default_chat_template_kwargs: expected a JSON object"):
        resolved(RuntimeConfig(default_chat_template_kwargs=given), tmp_path)
    config = RuntimeConfig(default_chat_template_kwargs='{"enable_thinking": false}')
    assert resolved(config, tmp_path).template_defaults == {"enable_thinking": False}


@for_each("proxy", ["proxy.example", "10.0.0.1/8", "10.0.0.1:80", "10.0.0"])
def test_a_proxy_is_named_by_address(proxy: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^forwarded_allow_ips: "):
        resolved(RuntimeConfig(forwarded_allow_ips=f"10.0.0.0/8, {proxy}"), tmp_path)
    assert resolved(RuntimeConfig(forwarded_allow_ips="::1, *"), tmp_path).proxies == ["::1", "*"]


@for_each(
    "path",
    [
        "llm",
        "/",
        "//a",
        "/a b",
        "/a?b",
        "https://a/b",
        "/v1",
        "/v1/chat/",
        "/stats",
        "/..",
        "/a/../b",
        "/./a",
        "/a/.",
    ],
)
def test_a_root_path_is_a_path_and_none_of_the_servers_own(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^root_path: "):
        resolved(RuntimeConfig(root_path=path), tmp_path)


def test_a_root_path_may_end_with_a_slash(tmp_path: Path) -> None:
    assert resolved(RuntimeConfig(root_path="/a/b-1/"), tmp_path).root_path == "/a/b-1"
    own = {path.rpartition("/")[0] for endpoint in ENDPOINTS for path in [endpoint.path]} - {""}
    assert own <= set(OWN_PATHS)


def test_content_of_traces_needs_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^trace_content: .*--otlp-traces-endpoint"):
        resolved(RuntimeConfig(trace_content=True), tmp_path)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert resolved(RuntimeConfig(trace_content=True), tmp_path).trace_content


def test_a_certificate_and_its_key_are_read_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CERTIFICATE.parent)
    config = resolved(RuntimeConfig(ssl_certfile=CERTIFICATE.name, ssl_keyfile=str(KEY)), tmp_path)
    assert config.ssl_certfile == str(CERTIFICATE), "wherever the server's processes are started"
    assert config.http_url(1) == "https://127.0.0.1:1"
    both = tmp_path / "both.pem"
    both.write_bytes(CERTIFICATE.read_bytes() + KEY.read_bytes())
    assert resolved(RuntimeConfig(ssl_certfile=str(both)), tmp_path).ssl_certfile == str(both)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"ssl_keyfile": str(KEY)}, "ssl_keyfile: a key needs its certificate"),
        ({"ssl_certfile": "no.pem"}, "ssl_certfile: no.pem cannot be read: No such file"),
        ({**FILES, "ssl_keyfile": "no.pem"}, "ssl_keyfile: no.pem cannot be read"),
        ({"ssl_certfile": "/"}, "ssl_certfile: / cannot be read: Is a directory"),
        ({"ssl_certfile": str(CERTIFICATE)}, "ssl_certfile: .*are not a certificate and its key"),
        ({**FILES, "ssl_keyfile": str(CERTIFICATE)}, "ssl_keyfile: .*are not a certificate and its key"),
        ({**FILES, "ssl_keyfile": "other"}, "ssl_keyfile: .*are not a certificate and its key"),
        ({**FILES, "ssl_keyfile": "encrypted"}, "ssl_keyfile: .*the key without a password"),
    ],
)
def test_files_of_tls_that_will_not_do_are_refused_by_name(
    files: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is encrypted is not asked for a password, for nobody may be there to give it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("no key")
    (tmp_path / "encrypted").write_text(ENCRYPTED_KEY)
    with pytest.raises(ConfigError, match=said):
        resolved(from_values(files), tmp_path)


@for_each(
    "setting",
    [
        {"api_workers": 2},
        {"cors_origins": "*"},
        {"allowed_hosts": "*"},
        {"forwarded_allow_ips": "*"},
        {"max_connections": 9},
        {"max_connections_per_address": 9},
        {"metrics_open": True},
        {"log_level_http": "info"},
        {"host": "10.0.0.1"},
        {"port": 8000},
        {"sampling_defaults": "openai"},
        {"root_path": "/llm"},
        {"unknown_fields": "refuse"},
        {"api_key": "k"},
        {"api_key": "k", "curve_dir": "keys", "zmq_bind": "tcp://127.0.0.1:5000"},
        {"api_key_file": "key"},
        {"api_keys": "keys.toml"},
        FILES,
    ],
)
def test_a_setting_of_the_http_server_needs_one(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(setting))}: .*no_http"):
        resolved(RuntimeConfig(no_http=True, **setting), tmp_path)


@for_each(
    ("settings", "message"),
    [
        ({"restart": "never", "max_restarts": 3}, "max_restarts: with --restart never"),
        ({"restart": "never", "max_engine_restarts": 3}, "max_engine_restarts: with --restart never"),
        ({"restart": "never", "restart_window": 3.0}, "restart_window: with --restart never"),
        ({"max_logits_bytes": 3}, "max_logits_bytes: .* --gather-context-logits"),
        ({"metrics_open": True}, "metrics_open: without an API key"),
        ({"speculative_num_draft_tokens": 8}, "speculative_num_draft_tokens: nothing is guessed; add"),
        ({"disable_radix_cache": True, "schedule_policy": "lpm"}, "schedule_policy: lpm orders by cached"),
        (
            {"disable_radix_cache": True, "schedule_policy": "dfs-weight"},
            "schedule_policy: dfs-weight orders",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(RuntimeConfig(**settings), tmp_path)


def test_a_setting_of_what_there_is_is_taken(tmp_path: Path) -> None:
    resolved(RuntimeConfig(max_restarts=3), tmp_path)
    resolved(RuntimeConfig(no_http=True, port=0), tmp_path)
    resolved(RuntimeConfig(max_logits_bytes=3, gather_context_logits=True), tmp_path)
    resolved(RuntimeConfig(metrics_open=True, api_key="secret"), tmp_path)
    resolved(RuntimeConfig(speculative_num_draft_tokens=8, speculative_algorithm="NGRAM"), tmp_path)
    resolved(RuntimeConfig(schedule_policy="lpm"), tmp_path)
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text("[alice]\nmax_running = 8\nkey = 'k'\n")
    over_tcp = {"curve_dir": "keys", "zmq_bind": "tcp://127.0.0.1:5000"}
    resolved(from_values({"no_http": True, "api_keys": str(keys), **over_tcp}), tmp_path)


def test_every_setting_has_a_help_text() -> None:
    text = make_parser("x").format_help()
    for field in msgspec.structs.fields(RuntimeConfig):
        assert "--" + field.name.replace("_", "-") in text


def test_resolve_fills_in_what_the_model_decides(tmp_path: Path) -> None:
    config = resolved(RuntimeConfig(model=str(tmp_path)), tmp_path)
    assert config.context_length == 2048
    assert config.dtype == "bfloat16"
    assert config.served_model_name == tmp_path.name
    assert config.device in ("cpu", "cuda")
    assert config.cpu_threads >= 1
    assert resolved(RuntimeConfig(dtype="half"), tmp_path).dtype == "float16"


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "cuda"), ("0,1", "cuda"), ("1,-1", "cuda"), ("", "cpu"), ("-1", "cpu")]
)
def test_whoever_hides_all_gpus_gets_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str
) -> None:
    monkeypatch.setattr("runtime.launcher.checks.device.DRIVER_FILES", ("/dev/null",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolved(RuntimeConfig(model=str(tmp_path)), tmp_path).device == device


def test_the_worker_gets_a_thread_for_each_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(cgroup, "OWN_GROUPS", tmp_path / "own")
    assert resolved(RuntimeConfig(model=str(tmp_path)), tmp_path).cpu_threads == 4
    assert resolved(RuntimeConfig(model=str(tmp_path), cpu_threads=2), tmp_path).cpu_threads == 2
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path)
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("200000 100000\n")  # a container with --cpus 2
    assert resolved(RuntimeConfig(model=str(tmp_path)), tmp_path).cpu_threads == 2


def test_what_the_kv_cache_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    refused = RuntimeConfig(model=str(tmp_path), radix_eviction_policy="lfu", disable_radix_cache=True)
    with pytest.raises(ConfigError, match="radix_eviction_policy"):
        resolved(refused, tmp_path)
    assert resolved(RuntimeConfig(radix_eviction_policy="lfu"), tmp_path).radix_eviction_policy == "lfu"


def test_deterministic_is_refused_where_it_cannot_be_promised(tmp_path: Path) -> None:
    wanted = RuntimeConfig(model=str(tmp_path), device="cpu", deterministic=True)
    for dtype in ("auto", "bfloat16", "half", "float32"):
        assert resolved(msgspec.structs.replace(wanted, dtype=dtype), tmp_path).deterministic
    with pytest.raises(ConfigError, match=r"^deterministic: .*CUDA"):
        resolved(msgspec.structs.replace(wanted, device="cuda"), tmp_path)
    with pytest.raises(ConfigError, match="transformers"):
        resolve_config(wanted, context_length=64, dtype="bfloat16", model_path=tmp_path, has_spec=False)


@pytest.mark.parametrize(
    "config",
    [
        RuntimeConfig(tp_size=64, device="cuda"),
        RuntimeConfig(context_length=4096),
        RuntimeConfig(chat_template="/no/where"),
        RuntimeConfig(tokenizer="/no/where"),
        RuntimeConfig(zmq_bind="0.0.0.0:5000"),
        RuntimeConfig(curve_dir="keys"),
        RuntimeConfig(batching_type="V1", capacity_scheduler="max_utilization"),
        RuntimeConfig(batching_type="static", micro_batch_scheduler="a:B"),
        RuntimeConfig(request_scheduler="a:B", capacity_scheduler="c:D"),
        RuntimeConfig(capacity_scheduler="guaranteed_no_evict", schedule_policy="priority"),
        RuntimeConfig(capacity_scheduler="guaranteed_no_evict", schedule_conservativeness=0.5),
    ],
    ids=[
        *(
            "tp_size",
            "context_length",
            "chat_template",
            "tokenizer",
            "zmq_bind",
            "curve_dir",
        ),
        *("capacity_scheduler", "batching_type", "request_scheduler", "schedule_policy"),
        "schedule_conservativeness",
    ],
)
def test_what_cannot_be_honoured_is_refused(
    config: RuntimeConfig, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ConfigError, match=request.node.callspec.id):
        resolved(config, tmp_path)


@for_each("address", ["tcp://0.0.0.0:5000", "tcp://*:5000", "tcp://[::]:5000", "tcp://10.0.0.1:1"])
def test_other_machines_are_let_in_with_keys_only(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="--curve-dir"):
        resolved(RuntimeConfig(zmq_bind=address), tmp_path)
    assert resolved(RuntimeConfig(zmq_bind=address, curve_dir="keys"), tmp_path).zmq_bind == address


@pytest.mark.parametrize("curve_dir", ["run", "run/keys", "run/../run/keys"])
def test_keys_do_not_lie_where_a_launch_removes_all(tmp_path: Path, curve_dir: str) -> None:
    config = RuntimeConfig(
        run_dir=str(tmp_path / "run"), zmq_bind="tcp://*:5000", curve_dir=str(tmp_path / curve_dir)
    )
    with pytest.raises(ConfigError, match=r"curve_dir: .* in run_dir"):
        resolved(config, tmp_path)
    kept = msgspec.structs.replace(config, curve_dir=str(tmp_path / "run-keys"))
    assert resolved(kept, tmp_path).curve_dir == kept.curve_dir


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5000", "tcp://localhost:5000", "tcp://[::1]:5000"])
def test_this_machine_needs_no_keys(tmp_path: Path, address: str) -> None:
    assert tcp_endpoints(resolved(RuntimeConfig(zmq_bind=address), tmp_path)) is not None


def test_api_key_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAROUSEL_API_KEY", "secret")
    assert resolved(RuntimeConfig(), tmp_path).api_key == "secret"
    assert resolved(RuntimeConfig(api_key="own"), tmp_path).api_key == "own"
    (tmp_path / "key").write_text("filed")
    (tmp_path / "key").chmod(0o600)
    assert not resolved(RuntimeConfig(api_key_file=str(tmp_path / "key")), tmp_path).api_key


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_key_in_the_environment_is_refused_where_there_is_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("CAROUSEL_API_KEY", value)
    with pytest.raises(ConfigError, match=r"^CAROUSEL_API_KEY: the value is empty"):
        resolved(RuntimeConfig(), tmp_path)
    assert resolved(RuntimeConfig(api_key="own"), tmp_path).api_key == "own"
    resolved(RuntimeConfig(no_http=True), tmp_path)


def test_keys_are_told_apart_only_where_there_are_some(tmp_path: Path) -> None:
    for wrong in ("a,", ",", "a, ,b"):
        with pytest.raises(ConfigError, match="api_key: between two commas"):
            resolved(RuntimeConfig(api_key=wrong), tmp_path)
    for name in ("cache_salt_per_api_key", "share_prefixes_across_keys"):
        with pytest.raises(ConfigError, match=f"{name}: without --api-key"):
            resolved(from_values({name: True}), tmp_path)
    both = RuntimeConfig(api_key="a", cache_salt_per_api_key=True, share_prefixes_across_keys=True)
    with pytest.raises(ConfigError, match="is the opposite"):
        resolved(both, tmp_path)


def test_nobody_has_a_share_of_a_cache_that_all_share(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[a]\nsha256 = "{"0" * 64}"\ncache_share = 0.5\n')
    with pytest.raises(ConfigError, match=r"\[a\] cache_share: with share_prefixes_across_keys"):
        resolved(RuntimeConfig(api_keys=str(path), share_prefixes_across_keys=True), tmp_path)


def test_the_implementation_is_resolved_and_only_a_spec_has_ranks(tmp_path: Path) -> None:
    places: dict[str, Any] = {"context_length": 64, "dtype": "float32", "model_path": tmp_path}
    assert resolve_config(RuntimeConfig(), **places, has_spec=True).model_impl == "native"
    assert resolve_config(RuntimeConfig(), **places, has_spec=False).model_impl == "transformers"
    with pytest.raises(ConfigError, match="tp_size: --model-impl transformers computes on one rank"):
        resolve_config(RuntimeConfig(tp_size=2), **places, has_spec=False)


def test_names_that_can_be_chosen_are_those_of_the_tables() -> None:
    tables = {
        "attention_backend": ATTENTION_BACKENDS,
        "capacity_scheduler": CAPACITY_POLICIES,
        "radix_eviction_policy": EVICTION_POLICIES,
        "schedule_policy": POLICIES,
    }
    assert {setting: set(names) for setting, names in NAMES.items() if names} == {
        setting: set(table) for setting, table in tables.items()
    }


@for_each("setting", NAMES)
def test_an_unknown_name_is_refused_before_anything_is_started(tmp_path: Path, setting: str) -> None:
    """The user's own is imported by the process that needs it."""
    flag = setting.replace("_", "-")
    for name in {"nonesuch", "auto", ""} - {getattr(RuntimeConfig(), setting)}:
        with pytest.raises(ConfigError, match=f"{setting}: --{flag} '{name}' is unknown; .*module:Class"):
            resolved(from_values({setting: name}), tmp_path)
    own = from_values({setting: "mine.module:Class"})
    assert getattr(resolved(own, tmp_path), setting) == "mine.module:Class"


def test_names_of_the_model_are_neither_empty_nor_named_twice() -> None:
    assert RuntimeConfig(served_model_name="a,, b,a,").model_names == ("a", "b")
