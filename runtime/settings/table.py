"""Table of all settings of a launch, by subject. The command line and its help are generated from it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from runtime.base.cpu_isa import CpuIsa
from runtime.settings.setting import setting


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings as given; `auto`, None and 0 stand for what `runtime.launcher.resolve` fills in."""

    # -- The model: what is loaded, and on what it runs ---------------------------------------------------

    model: Annotated[
        str,
        setting(
            "directory of a model, or its owner/name on the Hugging Face Hub; default: the demo model",
            "--model-path",
        ),
    ] = ""
    revision: Annotated[
        str, setting("branch, tag or commit of a model on the Hub; default: its main branch")
    ] = ""
    download_dir: Annotated[
        str, setting("where models of the Hub are kept; default: the Hub's own cache, which HF_HOME names")
    ] = ""
    tokenizer: Annotated[
        str,
        setting("directory of the tokenizer, or owner/name; default: the model's", "--tokenizer-path"),
    ] = ""
    served_model_name: Annotated[
        str,
        setting(
            "the model in /v1/models and replies; of several names replies use the first; default: "
            "the model's directory name"
        ),
    ] = ""
    chat_template: Annotated[str, setting("file with a Jinja chat template that replaces the model's")] = ""
    tool_call_parser: Annotated[
        str,
        setting(
            "format in which the model writes calls of tools (docs/tools.md), or none: requests with tools "
            "are refused; auto: as the chat template has it"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        setting(
            "format in which the model writes reasoning (docs/reasoning.md), or none: it is a part of the "
            "text; auto: as the chat template has it"
        ),
    ] = "auto"
    allow_special_tokens: Annotated[
        bool,
        setting(
            "special tokens in messages and in variables of the chat template are tokens; default: "
            "characters, as in any other text (docs/security.md)"
        ),
    ] = False
    skip_tokenizer_init: Annotated[
        bool, setting("load no tokenizer: token ids in, token ids out; the model needs no tokenizer files")
    ] = False
    task: Annotated[
        Literal["generate", "embed"],
        setting("what the model is for: generate text, or embed: one vector for a text (/v1/embeddings)"),
    ] = "generate"
    pooling: Annotated[
        Literal["auto", "last", "mean"],
        setting(
            "of an embedding model, which tokens make the vector; auto: as its sentence-transformers files "
            "say, or else the last"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        setting("where weights come from: auto, the model's safetensors files; dummy: random ones"),
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        setting(
            "who computes the model: native (a spec of this project), transformers (any other decoder of "
            "that library, slower), auto: native where there is a spec"
        ),
    ] = "auto"
    model_spec: Annotated[
        str,
        setting(
            "spec of your own for the model's architecture, as package.module:SPEC; default: the one of its "
            "row in docs/models.md (docs/adding_a_model.md)"
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "half", "float"],
        setting("dtype of weights and KV cache; auto: the checkpoint's"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "int8"],
        setting(
            "weights of linear layers; auto: as the checkpoint has them; int8: made when it is loaded, with "
            "activations of 8 bits (CPU; docs/models.md)",
        ),
    ] = "auto"
    rope_scaling: Annotated[
        str,
        setting(
            "JSON object in the place of the rotary scaling in the model's config.json; of linear and yarn "
            "the context becomes as much longer (docs/models.md)"
        ),
    ] = ""
    hf_overrides: Annotated[
        str, setting("JSON object whose keys take the place of those in the model's config.json")
    ] = ""
    context_length: Annotated[
        int,
        setting(
            "longest sequence, prompt and output; 0: the model's",
            "--max-model-len",
            "--max-seq-len",
            ge=0,
            le=1 << 22,
        ),
    ] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], setting("where the model runs")] = "auto"
    attention_backend: Annotated[
        str,
        setting(
            "auto, cpu_native (C++, compiled at the first start), triton and flashinfer (CUDA), "
            "torch_native, or your own as package.module:Class"
        ),
    ] = "auto"
    cpu_isa: Annotated[
        Literal["auto", CpuIsa],
        setting(
            "the most of the CPU's instruction sets that is used; auto: all that this CPU has, or what "
            "CAROUSEL_CPU_ISA names (docs/performance.md)"
        ),
    ] = "auto"
    cpu_threads: Annotated[
        int,
        setting(
            "threads of each CPU rank; 0: the cores divided among the ranks",
            ge=0,
            le=1024,
        ),
    ] = 0
    deterministic: Annotated[
        bool,
        setting(
            "bfloat16 and float32 logits of a sequence are the same bits in any batch, chunks and after a "
            "retraction; refuses what cannot promise it"
        ),
    ] = False
    tp_size: Annotated[
        int,
        setting(
            "tensor-parallel ranks: processes that have a part of the model each (docs/tensor_parallel.md)",
            "--tp",
            "-tp",
            "--tensor-parallel-size",
            ge=1,
            le=64,
        ),
    ] = 1
    gather_context_logits: Annotated[
        bool, setting("allow requests to ask for the raw logits of their prompt")
    ] = False
    gather_generation_logits: Annotated[
        bool, setting("allow requests to ask for the raw logits of their output")
    ] = False
    max_logits_bytes: Annotated[
        int, setting("raw logits of one sequence, at most; more is refused", ge=0, le=1 << 36)
    ] = 256 << 20

    # -- GPUs alone --------------------------------------------------------------------------------------

    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3"],
        setting(
            "of keys and values; auto: the model's; fp8_e4m3: half the memory, less exact (docs/cuda.md)"
        ),
    ] = "auto"
    cuda_graph_bs: Annotated[
        str,
        setting(
            "batch sizes whose decode step is recorded as a CUDA graph, like 1,2,4,8; default: 1, 2, 4 and "
            "every eighth up to cuda_graph_max_bs; docs/cuda.md",
            "--cudagraph-capture-sizes",
        ),
    ] = ""
    cuda_graph_max_bs: Annotated[
        int,
        setting(
            "largest batch whose decode step is recorded; 0: as many as may run, but no more than 256",
            "--max-cudagraph-capture-size",
            ge=0,
            le=4096,
        ),
    ] = 0
    disable_cuda_graph: Annotated[
        bool,
        setting(
            "record no steps: launch every kernel by itself, on a CPU from Python, too", "--enforce-eager"
        ),
    ] = False

    # -- The KV cache: how large it is, and what is kept in it --------------------------------------------

    max_total_tokens: Annotated[
        int,
        setting(
            "cap of the KV cache in tokens, rounded up to pages; 0: by memory alone, on a CPU an eighth of "
            "it and 8 GiB at most",
            ge=0,
            le=1 << 30,
        ),
    ] = 0
    mem_fraction_static: Annotated[
        float, setting("share of free memory for the KV cache", "--gpu-memory-utilization", gt=0.0, lt=1.0)
    ] = 0.85
    page_size: Annotated[int, setting("tokens per KV page", "--block-size", ge=1, le=256)] = 16
    disable_radix_cache: Annotated[
        bool, setting("do not keep KV of earlier requests", "--no-enable-prefix-caching")
    ] = False
    radix_eviction_policy: Annotated[
        str,
        setting(
            "what of the KV of earlier requests goes first: lru, lfu, fifo, filo, mru, priority, slru, or "
            "your own as package.module:Class"
        ),
    ] = "lru"
    max_attention_window: Annotated[
        int,
        setting(
            "tokens that a token sees in every layer, itself included, or the layer's own window if that is "
            "smaller: it changes what a longer text gives; 0: as the model's config says",
            ge=0,
            le=1 << 30,
        ),
    ] = 0

    # -- The scheduler: who runs, in which order, in how large steps --------------------------------------

    max_running_requests: Annotated[
        int, setting("requests that run at the same time (rows)", "--max-num-seqs", ge=1, le=4096)
    ] = 256
    max_queued_requests: Annotated[
        int,
        setting(
            "requests that may wait; more are refused with 503; 0: four times the rows", ge=0, le=1 << 20
        ),
    ] = 0
    max_queued_requests_per_client: Annotated[
        int,
        setting(
            "of those, how many may be one client's: a connection of the client library, or an HTTP server "
            "process; less where several have many, so that others find room; 0: three quarters, and all "
            "where no other is connected",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    max_starvation: Annotated[
        float,
        setting(
            "seconds that a request waits behind others of higher priority, at most; then it goes before all "
            "but those that have waited as long; 0: as long as there are any",
            ge=0.0,
            le=86400.0,
        ),
    ] = 30.0
    queue_timeout: Annotated[
        float,
        setting(
            "seconds after which a request that has not begun is refused with 503; pauses and restarts do "
            "not count; 0: never, which is the default of LLM",
            ge=0.0,
            le=86400.0,
        ),
    ] = 600.0
    chunked_prefill_size: Annotated[
        int,
        setting(
            "tokens computed in one step, at most",
            "--max-num-batched-tokens",
            "--max-num-tokens",
            ge=1,
            le=1 << 20,
        ),
    ] = 2048
    disable_chunked_prefill: Annotated[
        bool,
        setting(
            "compute each prompt whole, in one step; one of more than chunked_prefill_size tokens is refused",
            "--no-enable-chunked-prefill",
        ),
    ] = False
    max_batch_size: Annotated[
        int, setting("requests computed in one step, at most; 0: all that run", ge=0, le=4096)
    ] = 0
    batching_type: Annotated[
        Literal["inflight_fused", "inflight", "static", "InflightFusedBatching", "InflightBatching", "V1"],
        setting(
            "what one step is made of: prompts and decodes (inflight_fused), one or the other (inflight), or "
            "a batch that is closed until its last request has ended (static); docs/batching.md",
            "--model-type",
        ),
    ] = "inflight_fused"
    capacity_scheduler: Annotated[
        str,
        setting(
            "who fits: max_utilization (pauses requests when the KV cache is full), guaranteed_no_evict "
            "(never does), static_batch (nor lets anybody join), or your own as package.module:Class; auto: "
            "max_utilization, with static batching static_batch",
            "--capacity-scheduler-policy",
        ),
    ] = "auto"
    micro_batch_scheduler: Annotated[
        str,
        setting(
            "who of those that fit is in the next step: your own as package.module:Class; default: all of "
            "them, within the limits of a step"
        ),
    ] = ""
    request_scheduler: Annotated[
        str,
        setting("in place of capacity scheduler and micro-batch scheduler: your own as package.module:Class"),
    ] = ""
    schedule_policy: Annotated[
        str,
        setting(
            "order of the waiting queue: fcfs, priority, lpm, dfs-weight, shortest-first, lof, random, or "
            "your own as package.module:Class",
            "--scheduling-policy",
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float, setting("above 1: admit later and retract less; below 1: the reverse", gt=0.0, le=10.0)
    ] = 1.0
    disable_overlap_schedule: Annotated[
        bool, setting("wait for each step before planning the next", "--no-async-scheduling")
    ] = False
    grammar_backend: Annotated[
        Literal["auto", "llguidance", "none"],
        setting(
            "what keeps output to a JSON schema, a regular expression or a grammar "
            "(docs/structured_output.md); none: a request that asks for it is refused; auto: llguidance "
            "where text is generated",
            "--guided-decoding-backend",
        ),
    ] = "auto"
    speculative_algorithm: Annotated[
        Literal["none", "NGRAM"],
        setting(
            "who guesses the next tokens, which one step then verifies, with the same output: none; NGRAM, "
            "from what stands in prompt and output (docs/speculation.md)"
        ),
    ] = "none"
    speculative_num_draft_tokens: Annotated[
        int,
        setting(
            "guesses of one request in a step, at most",
            "--num-speculative-tokens",
            "--spec-tokens",
            ge=1,
            le=64,
        ),
    ] = 4
    iter_stats_max_iterations: Annotated[
        int, setting("steps of which statistics are kept to be asked for; 0: none", ge=0, le=100_000)
    ] = 1000
    request_stats_max_iterations: Annotated[
        int,
        setting(
            "steps of which statistics of every live request are kept; 0: none, as they cost each step 2 us "
            "for each of them",
            ge=0,
            le=10_000,
        ),
    ] = 0
    decode_log_interval: Annotated[
        int,
        setting(
            "steps between two decode log lines, of which there is one a second at most", ge=1, le=1 << 20
        ),
    ] = 40

    # -- The ring around the engine: HTTP, the client library's sockets, how many processes ---------------

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
    slow_reader_timeout: Annotated[
        float, setting("seconds after which a client that does not read is cut off", gt=0.0, le=86400.0)
    ] = 120.0
    api_workers: Annotated[
        int, setting("processes of the HTTP server", "--api-server-count", ge=1, le=64)
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
    profile_dir: Annotated[
        str,
        setting(
            "directory for the step timelines of /start_profile; default: the run directory, which goes with "
            "its launch"
        ),
    ] = ""
    run_dir: Annotated[str, setting("private directory of this launch; default: a new one per launch")] = ""

    # -- How the launcher starts, watches, restarts and ends the processes --------------------------------

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


GROUPS: dict[str, str] = {
    "model": "model",
    "kv_cache_dtype": "GPUs and recorded steps",
    "max_total_tokens": "KV cache",
    "max_running_requests": "scheduler",
    "host": "HTTP, client library, logs",
    "restart": "start, restarts, end",
}
"""Titles of the help, by the first setting of each group; a setting belongs to the last title before it."""
