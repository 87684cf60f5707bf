"""Families of flags of vLLM, SGLang and trtllm-serve that belong to what is not built, or is not set here.

A launch refuses them with the family's reason, where `runtime.settings.peer_flags` has no row of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

MISSPELT = 0.9
"""Similarity, at most 1, from which on an option is a misspelt one rather than one of a family. Arbitrary."""


class PeerFamily(NamedTuple):
    """Flags that are refused for one reason: names, and beginnings of names, which end with a dash."""

    names: tuple[str, ...]
    refused: str


_SEVERAL = "data parallelism is not built; start several servers behind a load balancer of yours"
_CACHE = "a KV cache is its server's alone; leave it out"
_NO_IMAGES = "models are served for text only; leave it out"
_METRICS = "docs/metrics.md and docs/statistics.md list what is measured; leave it out"
_KERNELS = "kernels are chosen by the device and --attention-backend; leave it out"

PEER_FAMILIES: tuple[PeerFamily, ...] = (
    PeerFamily(
        ("--speculative-ngram-",),
        "NGRAM looks for the longest match of up to 8 tokens in prompt and output; leave it out",
    ),
    PeerFamily(
        ("--speculative-", "--spec-", "--enable-multi-layer-eagle", "--enable-draft-weights-cpu-backup"),
        "draft models are not built; --speculative-algorithm NGRAM guesses from prompt and output",
    ),
    PeerFamily(
        (
            *("--data-parallel-", "-dpn", "-dpr", "-dpl", "-dpa", "-dpp", "-dpb", "-dph", "-dpe"),
            *("--enable-dp-", "--attn-dp-size", "--moe-dp-size", "--dwdp-size"),
        ),
        _SEVERAL,
    ),
    PeerFamily(
        (
            *("--decode-context-parallel-", "--prefill-context-parallel-", "--attn-cp-", "--dcp-", "--cp-"),
            *("-dcp", "-pcp", "--attention-context-parallel-size", "--enable-prefill-cp"),
        ),
        "context parallelism is not built; --tp-size divides the heads",
    ),
    PeerFamily(
        (
            *("--moe-", "--ep-", "--eplb-", "--enable-eplb", "--expert-", "--deepep-", "--elastic-ep-"),
            *("--max-ep-size", "--num-redundant-experts", "--init-expert-location", "--all2all-backend"),
            *("--kt-", "--enable-dbo", "--dbo-", "--cluster-size", "--enable-two-batch-overlap", "--tbo-"),
            "--enable-single-batch-overlap",
        ),
        "expert parallelism is not built; --tp-size divides the experts, too",
    ),
    PeerFamily(
        (
            *("--disaggregation-", "--kv-transfer-", "--ec-transfer-", "--encoder-", "--decoupled-spec-"),
            *("--server-role", "--metadata-server-config-file", "--disagg-cluster-uri"),
            *("--num-reserved-decode-tokens", "--enable-pdmux", "--pdmux-config-path"),
        ),
        "one server computes prompts and outputs; leave it out",
    ),
    PeerFamily(
        (
            *("--hicache-", "--enable-hicache", "--lmcache-", "--kv-offloading-", "--flexkv-"),
            *("--enable-flexkv", "--unified-cache-", "--enable-unified-", "--radix-cache-backend"),
            *("--hisparse-", "--enable-hisparse", "--kv-sharing-"),
        ),
        _CACHE,
    ),
    PeerFamily(
        (
            *("--mm-", "--enable-mm-", "--media-", "--allowed-local-media-path", "--allowed-media-domains"),
            *("--limit-mm-", "--video-pruning-rate", "--interleave-mm-strings", "--image-processor-"),
            *("--enable-multimodal-", "--enable-prefix-mm-cache", "--asr-", "--disable-fast-image-processor"),
            *("--enable-broadcast-mm-inputs-process", "--default-mm-loras", "--trust-mm-"),
        ),
        _NO_IMAGES,
    ),
    PeerFamily(
        ("--mamba-", "--enable-mamba-", "--linear-attn-", "--max-mamba-", "--enable-linear-", "--dllm-"),
        "models with recurrent layers and diffusion models are not built (docs/models.md); leave it out",
    ),
    PeerFamily(
        (
            *("--dsa-", "--nsa-", "--enable-dsa-", "--enable-nsa-", "--fp8-gemm-", "--fp4-gemm-"),
            *("--bf16-gemm-", "--flashinfer-", "--disable-flashinfer-", "--enable-flashinfer-", "--kernel-"),
            *("--triton-attention-", "--attention-config", "-ac", "--linear-backend", "--torch-compile-"),
            *("--enable-torch-compile-", "--enable-aiter-", "--disable-aiter-", "--enable-fused-"),
            *("--moe-runner-backend", "--disable-shared-experts-fusion", "--enforce-shared-experts-fusion"),
            *("--override-attention-dtype", "--enable-tf32-matmul", "--enable-lean-attention"),
        ),
        _KERNELS,
    ),
    PeerFamily(("--cuda-graph-sizes",), "--cudagraph-capture-sizes lists the sizes"),
    PeerFamily(
        (
            *("--cuda-graph-", "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"),
            *("--disable-cuda-graph-padding", "--debug-cuda-graph", "--enable-profile-cuda-graph"),
            "--enable-cudagraph-gc",
        ),
        "decode steps are recorded as --cuda-graph-bs and --cuda-graph-max-bs say, or --disable-cuda-graph",
    ),
    PeerFamily(
        (
            *("--enable-nccl-nvls", "--enable-symm-mem", "--enable-torch-symm-mem", "--enable-mscclpp"),
            *("--pre-warm-nccl", "--nccl-", "--disable-nccl-", "--enable-quant-communications"),
        ),
        "ranks add up over NCCL, or shared memory on a CPU; leave it out",
    ),
    PeerFamily(
        ("--dist-timeout",), "--start-timeout bounds a start, and --step-timeout a step; give one of them"
    ),
    PeerFamily(
        ("--pp-max-micro-batch-size", "--pp-async-batch-depth"),
        "how many batches are under way follows from --pp-size; leave it out",
    ),
    PeerFamily(
        ("--gpu-id-step", "--gpus-per-node", "--numa-"),
        "CUDA_VISIBLE_DEVICES says which GPUs a launch sees, and --nnodes how many machines there are",
    ),
    PeerFamily(("--use-ray", "--worker-use-ray"), "--executor ray has Ray find machines"),
    PeerFamily(
        ("--cpu-offload-", "--offload-", "--ple-offload-", "--enable-weights-cpu-backup"),
        "weights stay on their device; --tp-size divides them, --quantization int8 halves a CPU's",
    ),
    PeerFamily(
        (
            *("--weight-loader-", "--weight-cache-", "--remote-instance-", "--custom-weight-loader"),
            *("--checkpoint-engine-", "--delete-ckpt-after-loading", "--modelexpress-", "--startup-weight-"),
        ),
        "safetensors files are read as they are; leave it out",
    ),
    PeerFamily(
        ("--modelopt-", "--quantize-and-serve", "--torchao-config", "--qlora-adapter-name-or-path"),
        "--quantization int8 is made at load; docs/models.md lists the quantized checkpoints that are read",
    ),
    PeerFamily(("--weight-transfer-config",), "other weights come from a checkpoint (docs/weights.md)"),
    PeerFamily(
        ("--lora-use-", "--experts-shared-outer-loras", "--max-lora-chunk-size", "--enable-lora-overlap-"),
        "docs/lora.md says how adapters are kept and computed; leave it out",
    ),
    PeerFamily(
        (
            *("--default-priority-value", "--disable-priority-preemption", "--priority-scheduling-"),
            "--abort-on-priority-when-disabled",
        ),
        "priorities are requests' own; --schedule-policy priority takes rows back for them, fcfs takes none",
    ),
    PeerFamily(
        ("--scheduler-cls",),
        "--request-scheduler, --capacity-scheduler and --micro-batch-scheduler take classes of your own",
    ),
    PeerFamily(
        ("--max-num-scheduled-tokens", "--prefill-delayer-", "--enable-prefill-delayer", "--prefill-decode-"),
        "--chunked-prefill-size bounds the tokens of a step, and decodes come first; leave it out",
    ),
    PeerFamily(
        ("--retraction-policy", "--swa-", "--disable-hybrid-swa-memory"),
        "docs/kv_cache.md and docs/batching.md say how pages are kept and taken back; leave it out",
    ),
    PeerFamily(
        ("--max-input-len",), "--max-model-len bounds prompt and output together, and max_tokens the output"
    ),
    PeerFamily(
        ("--kv-cache-config", "--scheduler-config", "--peft-cache-config", "--executor-config"),
        "GenerationExecutor takes the object; here its fields are settings: docs/executor.md names them",
    ),
    PeerFamily(("--build-config",), "there are no engines to build; give its limits as settings"),
    PeerFamily(
        ("--extra-llm-api-options",), "give them as options, or in a file of options in YAML, --config FILE"
    ),
    PeerFamily(("--pooler-config", "--override-pooler-config"), "--pooling last or mean makes the vector"),
    PeerFamily(
        ("--trust-request-chat-template", "--hf-chat-template-name"),
        "--chat-template names the file of the one template",
    ),
    PeerFamily(
        ("--reasoning-parser-plugin", "--io-processor-plugin", "--custom-tokenizer"),
        "code of one's own is not read here; leave it out",
    ),
    PeerFamily(
        (
            *("--constrained-json-", "--guided-decoding-disable-any-whitespace"),
            "--guided-decoding-disable-additional-properties",
        ),
        "a schema says what its JSON may have, and docs/structured_output.md how it may be spaced",
    ),
    PeerFamily(
        ("--stream-response-default-include-usage",),
        "a request asks for usage itself, with stream_options.include_usage",
    ),
    PeerFamily(
        ("--incremental-streaming-output", "--stream-output"),
        "events of /generate have all output so far; those of completions and chat have what is new",
    ),
    PeerFamily(
        ("--return-input-ids", "--return-output-ids"), "a request asks for them itself, with return_token_ids"
    ),
    PeerFamily(
        ("--enable-response-store", "--file-storage-path"), "responses and files are not kept; leave it out"
    ),
    PeerFamily(
        ("--enable-tokenizer-info-endpoint", "--enable-offline-docs"),
        "there is no such path; GET /openapi.json lists those there are",
    ),
    PeerFamily(("--tokens-only",), "--skip-tokenizer-init serves token ids alone"),
    PeerFamily(
        (
            *("--bucket-", "--prompt-tokens-buckets", "--generation-tokens-buckets", "--tokenizer-metrics-"),
            *("--kv-cache-metrics", "--kv-cache-metrics-", "--cudagraph-metrics", "--enable-mfu-metrics"),
            *("--show-hidden-metrics-", "--export-metrics-", "--extra-metric-labels", "--show-time-cost"),
            *("--enable-request-time-stats-logging", "--enable-logging-iteration-details"),
            *("--collect-tokens-histogram", "--forward-pass-metrics-", "--enable-forward-pass-metrics"),
        ),
        _METRICS,
    ),
    PeerFamily(
        ("--enable-log-outputs", "--enable-log-deltas", "--log-requests-"),
        "what requests ask for, and what is answered, is never logged; leave it out",
    ),
    PeerFamily(
        ("--profiler-config", "--enable-layerwise-nvtx-", "--debug-tensor-dump-"),
        "docs/observability.md says what can be recorded while it serves; leave it out",
    ),
    PeerFamily(
        ("--uvicorn-access-log-",), "--log-level-http warning leaves out the lines of the HTTP server"
    ),
    PeerFamily(
        ("--h11-", "--http2-", "--enable-http2"),
        "HTTP/1.1 with the limits in docs/openai.md is served; a proxy may speak HTTP/2 to its clients",
    ),
    PeerFamily(("--grpc", "--grpc-", "--smg-"), "HTTP and the ZMQ of the client library are served"),
    PeerFamily(("--soft-watchdog-timeout",), "--step-timeout is when a step counts as hung"),
    PeerFamily(("--rl-on-policy-target",), "--deterministic gives a sequence the same bits in any batch"),
    PeerFamily(("--enable-fp32-lm-head",), "--dtype float32 computes all of the model so"),
    PeerFamily(("--watermark-", "--enable-watermark"), "texts are not marked; leave it out"),
)
"""Families, the narrower before the wider."""


def family_reason(option: str, known: Sequence[str] = ()) -> str | None:
    """Return why an option of another server is refused. None for one of no family, and for one that begins
    like a family but is nearly a `known` option, which it is meant to be.
    """
    for family in PEER_FAMILIES:
        if option in family.names:
            return family.refused
    if get_close_matches(option, known, n=1, cutoff=MISSPELT):
        return None
    for family in PEER_FAMILIES:
        if any(name.endswith("-") and option.startswith(name) for name in family.names):
            return family.refused
    return None
