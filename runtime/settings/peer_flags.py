"""Flags of vLLM, SGLang and trtllm-serve that are no settings here: understood, taken or refused.

Flags that are a setting under another name are that setting's other spellings (`runtime.settings.setting`).
Flags that are refused with many others, for one reason, are in `runtime.settings.peer_families`.
docs/migrating.md shows all; tests/unit/launcher/test_peer_flags.py holds it to this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.errors import ConfigError
from runtime.settings.peer_flag import (
    Meaning,
    PeerFlag,
    chosen,
    no_switch,
    no_value,
    switch,
    understood,
    value,
)
from runtime.settings.speculative_config import ngram_settings

MAX_DETOKENIZERS = 64
_SEVERAL = "start several servers behind a load balancer of yours"
_NO_DRAFTS = "draft models are not built; --speculative-algorithm NGRAM guesses from prompt and output"
_GRAMMAR = "give llguidance or xgrammar, which are built, or none"
_NO_IMAGES = "models are served for text only; leave it out"
_NO_RAY = "--executor ray has Ray find machines; --nnodes and --node-rank are for those that you start"
_NO_TRANSFER = "a KV cache is its server's alone; leave it out"
_CORS = "--cors-origins names the origins whose pages may call; methods and headers follow from the routes"
_POOL = "the KV cache is sized by --mem-fraction-static, or in tokens by --max-total-tokens"


def detokenizers(option: str, value: str) -> Mapping[str, Any] | None:
    """Return the settings for a number of TensorRT-LLM's postprocess workers."""
    is_number = value.isascii() and value.isdecimal() and 0 < int(value) <= MAX_DETOKENIZERS
    return {"detokenizer_workers": int(value)} if is_number else None


PEER_FLAGS: tuple[PeerFlag, ...] = (
    # -- The model ----------------------------------------------------------------------------------------
    switch(
        "--trust-remote-code",
        taken="code of a model's repository is never run; a model that needs it is refused when it is read",
    ),
    no_value("--json-model-override-args", refused="--hf-overrides takes the same JSON"),
    value("--code-revision", taken="code of a model's repository is never run"),
    no_value("--tokenizer-revision", refused="name a directory that has that revision with --tokenizer"),
    no_value("--hf-token", refused="set the environment variable HF_TOKEN, or log in with hf auth login"),
    no_value("--hf-config-path", refused="config.json is read from the model's directory; put it there"),
    value(
        "--config-format",
        taken="config.json of Hugging Face's format is what is read",
        neutral=("auto", "hf"),
        refused="only Hugging Face's format is read; convert the checkpoint",
    ),
    value(
        "--tokenizer-mode",
        taken="tokenizer.json is read by the tokenizers library, which is the fast one",
        neutral=("auto", "hf", "fast"),
        refused="only tokenizer.json is read; make one with transformers' convert_slow_tokenizer",
    ),
    value(
        "--tokenizer-backend",
        taken="it is the tokenizers library",
        neutral=("huggingface",),
        refused="the tokenizers library is the only one; leave it out",
    ),
    chosen(
        "--runner",
        generate={"task": "generate"},
        pooling={"task": "embed"},
        auto=None,
        taken="--task says what the model is for",
        refused="--task generate and --task embed are what is served",
    ),
    chosen(
        "--convert",
        embed={"task": "embed"},
        auto=None,
        none=None,
        taken="--task says what the model is for",
        refused="of a decoder embeddings can be had, with --task embed; classes and rewards are not built",
    ),
    understood("--is-embedding", task="embed"),
    chosen(
        "--generation-config",
        auto={"sampling_defaults": "model"},
        vllm={"sampling_defaults": "openai"},
        refused="generation_config.json is read from the model's directory; put it there",
    ),
    no_value(
        "--override-generation-config",
        "--preferred-sampling-params",
        refused="sampling is the request's, or the model's generation_config.json's; change that file",
    ),
    value(
        "--chat-template-content-format",
        taken="parts of a message's content are joined before the template sees them",
        neutral=("auto", "string"),
        refused="parts of a message's content are joined before the template sees them; leave it out",
    ),
    value(
        "--response-role",
        taken="answers have the role assistant",
        neutral=("assistant",),
        refused="answers have the role assistant; leave it out",
    ),
    no_value("--completion-template", refused="completions have no template; use chat completions"),
    value(
        "--backend",
        taken="models are computed by Carousel itself",
        neutral=("pytorch", "_autodeploy"),
        refused="there are no TensorRT engines; --model names a checkpoint in Hugging Face format",
    ),
    value(
        *("--use-tqdm-on-load", "--safetensors-load-strategy", "--pt-load-map-location"),
        taken="safetensors files are read as they are",
    ),
    switch(
        *("--language-model-only", "--skip-mm-profiling", "--disable-mm-preprocessor-cache"),
        "--disable-chunked-mm-input",
        taken="models are served for text only",
    ),
    value("--mm-processor-cache-gb", taken="models are served for text only"),
    value("--ignore-patterns", taken="only safetensors, tokenizer and configuration files are downloaded"),
    value("--model-loader-extra-config", taken="safetensors files are read as they are"),
    value("--max-parallel-loading-workers", taken="each rank reads its own slices of the files"),
    no_value("--quantization-param-path", refused="scales of keys and values are read from the checkpoint"),
    no_switch("--calculate-kv-scales", refused="scales of keys and values are read from the checkpoint"),
    no_value("--rope-theta", refused="give it as rope_theta in --hf-overrides"),
    no_switch("--disable-sliding-window", refused="a layer's window is the model's; leave it out"),
    no_switch("--enable-multimodal", refused=_NO_IMAGES),
    no_value("--limit-mm-per-prompt", "--mm-processor-kwargs", "--mm-attention-backend", refused=_NO_IMAGES),
    no_switch("--enable-lora-bias", refused="adapters with biases are refused; leave it out"),
    switch("--fully-sharded-loras", taken="each rank has the part of an adapter that its weights need"),
    value("--max-cpu-loras", "--max-loaded-loras", taken="adapters that wait stay in their files"),
    value("--lora-extra-vocab-size", taken="an adapter with tokens of its own is refused when it is read"),
    value(
        "--lora-eviction-policy",
        taken="the adapter that was used least recently makes room",
        neutral=("lru",),
        refused="the adapter that was used least recently makes room; leave it out",
    ),
    switch("--enable-prompt-adapter", taken="virtual tokens come with requests (docs/lora.md)"),
    value("--lora-backend", taken="kernels are chosen by the device"),
    value("--lora-target-modules", taken="each adapter says itself which modules it changes"),
    value(
        "--lora-dtype",
        taken="adapters are of the model's dtype",
        neutral=("auto",),
        refused="adapters are of the model's dtype; leave it out",
    ),
    # -- What requests may ask for ------------------------------------------------------------------------
    value(
        "--seed",
        "--random-seed",
        taken="a request's own seed decides; one without draws a new one, whatever the launch's",
    ),
    value(
        "--max-logprobs",
        taken="a request may ask for 20 log-probabilities a token",
        neutral=("20",),
        refused="a request may ask for up to 20 log-probabilities a token, and that is not changed",
    ),
    value(
        "--logprobs-mode",
        taken="log-probabilities are those of the raw logits",
        neutral=("raw_logprobs",),
        refused="log-probabilities are those of the raw logits; leave it out",
    ),
    switch(
        "--exclude-tools-when-tool-choice-none", taken="with tool_choice none the template shows no tools"
    ),
    switch("--guided-decoding-disable-fallback", taken="an output keeps to its guide, or is refused"),
    switch("--disable-outlines-disk-cache", taken="grammars are not kept on disk"),
    switch("--enable-auto-tool-choice", taken="tools may be called wherever --tool-call-parser reads calls"),
    no_value(
        "--tool-parser-plugin", refused="parsers are those of --tool-call-parser; one of your own is not read"
    ),
    no_value("--tool-server", refused="tools are called by the client; leave it out"),
    no_value("--reasoning-config", refused="--reasoning-parser names the format of reasoning"),
    switch("--enable-reasoning", taken="reasoning is told apart wherever --reasoning-parser knows it"),
    no_value("--structured-outputs-config", refused="choose a backend with --grammar-backend"),
    PeerFlag(
        ("--speculative-config", "-sc"),
        has_value=True,
        understood={'{"method": "ngram"}': {"speculative_algorithm": "NGRAM"}},
        read=ngram_settings,
        refused=_NO_DRAFTS,
    ),
    value(
        *("--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min"),
        taken="NGRAM looks for the longest match of up to 8 tokens",
    ),
    chosen("--spec-method", ngram={"speculative_algorithm": "NGRAM"}, refused=_NO_DRAFTS),
    no_value(
        *("--speculative-model", "--speculative-draft-model-path", "--spec-model"),
        *("--speculative-num-steps", "--speculative-eagle-topk"),
        refused=_NO_DRAFTS,
    ),
    switch("--enable-prompt-tokens-details", taken="usage always says how many prompt tokens were cached"),
    switch("--enable-cache-report", taken="usage always says how many prompt tokens were cached"),
    no_switch(
        "--enable-force-include-usage",
        refused="a request asks for usage itself, with stream_options.include_usage",
    ),
    no_switch(
        "--return-tokens-as-token-ids",
        refused="a request asks for token ids itself, with return_token_ids",
    ),
    no_switch("--enable-custom-logit-processor", refused="a request's code is never run; leave it out"),
    no_value(
        "--logits-processors",
        refused="its classes have another interface; see --logits-processor",
    ),
    no_switch("--enable-return-hidden-states", refused="name them: --additional-output hidden_states"),
    no_switch("--enable-prompt-embeds", refused="prompts are text or token ids; leave it out"),
    no_switch("--allow-auto-truncate", refused="requests say so themselves, with truncate_prompt_tokens: -1"),
    # -- The KV cache and the scheduler -------------------------------------------------------------------
    understood("--enable-mixed-chunk", batching_type="inflight_fused"),
    value(
        "--max-prefill-tokens",
        taken="--chunked-prefill-size is what bounds the tokens of a step",
    ),
    value("--swap-space", taken="nothing is swapped: a request taken back is computed again"),
    value(
        "--cpu-offload-gb",
        taken="weights stay on their device",
        neutral=("0", "0.0"),
        refused="weights stay on their device; --tp-size divides them, --quantization int8 halves a CPU's",
    ),
    value(
        "--preemption-mode",
        taken="a request taken back is computed again",
        neutral=("recompute",),
        refused="a request taken back is computed again; leave it out",
    ),
    no_value("--kv-cache-memory-bytes", "--num-gpu-blocks-override", refused=_POOL),
    value("--prefix-caching-hash-algo", taken="the cache compares the tokens themselves"),
    no_switch("--enable-hierarchical-cache", "--enable-lmcache", refused=_NO_TRANSFER),
    no_value("--kv-transfer-config", "--kv-events-config", "--kv-offloading-size", refused=_NO_TRANSFER),
    value(
        "--disaggregation-mode",
        taken="one server computes prompts and outputs",
        neutral=("null",),
        refused="one server computes prompts and outputs; leave it out",
    ),
    no_value(
        "--max-num-partial-prefills",
        "--max-long-partial-prefills",
        "--long-prefill-token-threshold",
        refused="--chunked-prefill-size divides a step; which prompts are in it is --schedule-policy's",
    ),
    no_value("--prefill-max-requests", refused="--max-batch-size bounds the requests of a step"),
    no_switch(
        "--enable-priority-scheduling",
        "--schedule-low-priority-values-first",
        refused="--schedule-policy priority: higher values go first, and may take rows back",
    ),
    value("--scheduler-delay-factor", taken="a step begins when there is something to compute"),
    value(
        *("--num-scheduler-steps", "--num-continuous-decode-steps", "--num-lookahead-slots"),
        taken="steps are planned one ahead while one computes",
    ),
    switch(
        "--use-v2-block-manager", "--disable-hybrid-kv-cache-manager", taken="there is one manager of pages"
    ),
    switch(
        *("--disable-async-output-proc", "--multi-step-stream-outputs"),
        taken="outputs are processed beside the steps, by --detokenizer-workers processes",
    ),
    switch(
        *("--enable-tokenizer-batch-encode", "--disable-tokenizer-batch-decode"),
        "--enable-dynamic-batch-tokenizer",
        taken="texts are encoded as they come, by --tokenizer-workers processes",
    ),
    value(
        *("--tokenizer-pool-size", "--tokenizer-pool-type", "--tokenizer-pool-extra-config"),
        taken="texts are encoded by --tokenizer-workers processes",
    ),
    PeerFlag(
        ("--num-postprocess-workers",),
        has_value=True,
        understood={"0": {"detokenizer_workers": 1}},
        read=detokenizers,
        refused="expected a whole number up to 64",
    ),
    switch("--sleep-on-idle", taken="a process without work sleeps until a message comes"),
    # -- How it computes ----------------------------------------------------------------------------------
    value(
        "--sampling-backend",
        taken="sampling is the device's: C++ on a CPU, Triton on CUDA; the result is the same",
    ),
    value(
        *("--compilation-config", "-O", "-cc", "--optimization-level"),
        taken="kernels are compiled as they are needed, not by torch.compile",
    ),
    value("--max-seq-len-to-capture", taken="recorded steps are for sequences of any length"),
    switch("--enable-torch-compile", taken="kernels are compiled as they are needed, not by torch.compile"),
    understood("--enable-deterministic-inference", deterministic=True),
    no_value(
        "--prefill-attention-backend",
        "--decode-attention-backend",
        refused="--attention-backend computes prompts and outputs alike",
    ),
    switch("--disable-cascade-attn", taken="a shared prefix is read by each row for itself"),
    switch("--disable-custom-all-reduce", taken="ranks add up over NCCL, or shared memory on a CPU"),
    switch("--enable-p2p-check", taken="NCCL finds out itself what GPUs can reach"),
    no_switch("--enable-sleep-mode", "--enable-memory-saver", refused="weights stay on their device"),
    value(
        "--data-parallel-size",
        "--dp-size",
        "--dp",
        "-dp",
        taken="a launch has one engine",
        neutral=("1",),
        refused=f"data parallelism is not built; {_SEVERAL}",
    ),
    value(
        "--expert-parallel-size",
        "--ep-size",
        "--ep",
        taken="experts are divided by --tp-size",
        neutral=("1",),
        refused="expert parallelism is not built; --tp-size divides the experts, too",
    ),
    no_switch(
        "--enable-expert-parallel",
        "-ep",
        refused="expert parallelism is not built; --tp-size divides the experts, too",
    ),
    no_switch("--enable-dp-attention", refused=f"data parallelism is not built; {_SEVERAL}"),
    no_value("--load-balance-method", "--data-parallel-backend", refused=f"there is one engine; {_SEVERAL}"),
    understood("--headless", no_http=True),
    value(
        "--distributed-executor-backend",
        taken="each rank is a process; --nnodes puts them on several machines",
        neutral=("mp", "uni"),
        refused=_NO_RAY,
    ),
    no_value("--base-gpu-id", refused="CUDA_VISIBLE_DEVICES says which GPUs a launch sees"),
    # -- Server and log -----------------------------------------------------------------------------------
    switch(
        "--disable-log-requests",
        taken="what requests ask for is not logged; --log-level-http warning "
        "leaves out the lines of the HTTP server",
    ),
    no_switch(
        "--enable-log-requests",
        "--log-requests",
        refused="what requests ask for is never logged; --log-level info names path and status of each",
    ),
    value("--log-requests-level", "--max-log-len", taken="what requests ask for is not logged"),
    understood("--disable-log-stats", decode_log_interval=1 << 20),
    understood("--disable-uvicorn-access-log", log_level_http="warning"),
    no_value("--log-config-file", refused="lines go to standard error; --log-level says how many"),
    switch("--enable-metrics", taken="/metrics is always there"),
    switch(
        "--enable-metrics-for-all-schedulers", taken="there is one scheduler, and /metrics has its figures"
    ),
    switch("--enable-request-id-headers", taken="every answer has X-Request-Id"),
    switch("--log-error-stack", taken="an error of the server is logged with its stack"),
    switch("--fail-on-environ-validation", taken="no environment variables of vLLM are read"),
    switch("--telemetry", taken="nothing is sent to anybody"),
    switch("--enable-server-load-tracking", taken="/stats says what runs and waits"),
    no_value("--collect-detailed-traces", refused="traces have every phase of a request; leave it out"),
    no_switch("--enable-trace", refused="--otlp-traces-endpoint says where traces are sent"),
    switch("--skip-server-warmup", taken="no request is made to warm up; the worker does without"),
    no_value("--warmups", refused="the worker warms up by itself; leave it out"),
    switch("--disable-frontend-multiprocessing", taken="--api-workers says how many processes serve HTTP"),
    switch("--disable-fastapi-docs", taken="there are no pages of docs; /openapi.json stays"),
    no_switch("--allow-credentials", refused=_CORS),
    no_value("--allowed-methods", "--allowed-headers", refused=_CORS),
    no_value("--middleware", refused="code of one's own is not run in the server; use a proxy"),
    no_value("--fastapi-root-path", refused="--root-path is its name here"),
    no_value(
        *("--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-keyfile-password", "--ssl-ciphers"),
        refused="--ssl-keyfile and --ssl-certfile are what is taken; a proxy asks clients for certificates",
    ),
    no_switch("--enable-ssl-refresh", refused="a launch reads its certificate once; start it again"),
    no_value("--uds", refused="HTTP is served over TCP; the client library needs no port (--no-http)"),
    no_value("--admin-api-key", refused="--api-keys gives keys roles (docs/security.md)"),
    no_value("--crash-dump-folder", refused="requests are not written to files; leave it out"),
)
"""Rows of the table, by subject."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "attention_backend": {"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch_native"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "grammar_backend": {"guidance": "llguidance"},
    "log_level": {"critical": "error"},
    "log_level_http": {"critical": "error", "trace": "debug"},
    "model_impl": {"vllm": "native", "sglang": "native"},
    "speculative_algorithm": {"ngram": "NGRAM"},
}
"""Values of our settings under the names of vLLM and SGLang."""
NEUTRAL_VALUES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "load_format": {"safetensors": ("auto", "safetensors files are all that is ever read")},
}
"""Values of our settings that have no effect because the launch behaves like that anyway: the value, and the
reason.
"""
REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "attention_backend": dict.fromkeys(
        (
            "fa3",
            "fa4",
            "FLASH_ATTN",
            "FLASHINFER_MLA",
            "FLEX_ATTENTION",
            "trtllm_mha",
            "trtllm_mla",
            "flashmla",
        ),
        "it is not built; leave it out, and the device's own is chosen",
    ),
    "quantization": dict.fromkeys(
        ("fp8", "compressed-tensors", "modelopt", "modelopt_fp8", "w8a8_int8", "w8a8_fp8", "fbgemm_fp8"),
        "a checkpoint in float8 or int8 is recognised without it; leave it out (docs/models.md)",
    )
    | dict.fromkeys(
        ("awq", "gptq", "awq_marlin", "gptq_marlin", "gguf", "bitsandbytes", "mxfp4", "modelopt_fp4"),
        "this format is not built; docs/models.md says which are",
    ),
    "chunked_prefill_size": {
        "-1": "--disable-chunked-prefill computes prompts whole, those of up to --chunked-prefill-size tokens"
    },
    "grammar_backend": dict.fromkeys(("outlines", "lm-format-enforcer"), _GRAMMAR),
    "context_length": dict.fromkeys(
        ("-1", "auto"), "leave it out for the model's own length, or name one that fits the KV cache"
    ),
    "load_format": dict.fromkeys(
        ("pt", "npcache", "gguf", "bitsandbytes", "mistral", "tensorizer", "runai_streamer"),
        "safetensors files are all that is ever read; convert the checkpoint",
    ),
    "speculative_algorithm": dict.fromkeys(("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"), _NO_DRAFTS),
}
"""Values of vLLM and SGLang that our settings do not have, and what to do instead."""

_BY_NAME = {name: flag for flag in PEER_FLAGS for name in flag.names}


def peer_flag(option: str) -> PeerFlag | None:
    """Return the row of an option, spelled as in vLLM or SGLang, or None."""
    return _BY_NAME.get(option)


def value_of(setting: str, option: str, text: str) -> Meaning:
    """Return the meaning of a setting's value as users of vLLM or SGLang write it. Raises ConfigError for one
    that is refused.
    """
    if (reason := REFUSED_VALUES.get(setting, {}).get(text)) is not None:
        raise ConfigError(f"{option} {text}: {reason}")
    if text in (neutral := NEUTRAL_VALUES.get(setting, {})):
        own, note = neutral[text]
        return Meaning({setting: own}, note)
    return Meaning({setting: VALUES.get(setting, {}).get(text, text)}, "")
