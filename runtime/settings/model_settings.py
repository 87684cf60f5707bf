"""Settings of the model, adapters, nodes and devices."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from runtime.base.cpu_isa import CpuIsa
from runtime.settings.setting import setting


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the model: its files, and the device that it runs on."""

    TITLE: ClassVar[str] = "model"

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
            "format in which the model writes tool calls (docs/tools.md), or none: requests with tools "
            "are refused; auto: as the chat template has it",
            "--tool-parser",
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
    weights_dir: Annotated[
        str,
        setting(
            "directory below which checkpoints are whose weights may take the place of the model's while it "
            "is served (docs/weights.md)"
        ),
    ] = ""
    weight_version: Annotated[
        str, setting("name of the weights in answers, until others take their place", max_length=256)
    ] = "default"
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
            "-q",
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
            "threads of each CPU rank; 0: the cores, or as many as a container or job may use, divided among "
            "the ranks",
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
    pp_size: Annotated[
        int,
        setting(
            "pipeline stages: each has some of the layers, and as many ranks as --tp-size says "
            "(docs/pipeline_parallel.md)",
            "--pp",
            "-pp",
            "--pipeline-parallel-size",
            ge=1,
            le=64,
        ),
    ] = 1
    pp_layers: Annotated[
        str,
        setting(
            "layers of each pipeline stage, with commas; default: by their weights",
        ),
    ] = ""
    gather_context_logits: Annotated[
        bool, setting("allow requests to ask for the raw logits of their prompt")
    ] = False
    gather_generation_logits: Annotated[
        bool, setting("allow requests to ask for the raw logits of their output")
    ] = False
    max_logits_bytes: Annotated[
        int,
        setting(
            "raw logits and additional outputs of one sequence, at most; more is refused", ge=0, le=1 << 36
        ),
    ] = 256 << 20
    additional_output: Annotated[
        str,
        setting(
            "what requests may ask for of the model's inside, like hidden_states:12,mlp:3 "
            "(docs/additional_outputs.md)"
        ),
    ] = ""


class AdapterSettings(ModelSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of LoRA adapters."""

    TITLE: ClassVar[str] = "LoRA adapters"

    enable_lora: Annotated[
        bool, setting("serve LoRA adapters beside the model (docs/lora.md); --lora-modules implies it")
    ] = False
    lora_modules: Annotated[
        str,
        setting(
            "adapters that requests may name as their model, like sql=/adapters/sql: directories as PEFT "
            "writes them",
            "--lora-paths",
        ),
    ] = ""
    max_loras: Annotated[
        int,
        setting(
            "adapters that lie on the device at the same time; others take their place when nobody uses them",
            "--max-loras-per-batch",
            ge=1,
            le=256,
        ),
    ] = 8
    max_lora_rank: Annotated[
        int, setting("largest rank of an adapter; one with more is refused", ge=1, le=512)
    ] = 64
    allow_lora_updates: Annotated[
        bool, setting("adapters may be loaded and unloaded over HTTP while it runs; needs --lora-dir")
    ] = False
    lora_dir: Annotated[str, setting("directory below which adapters are that may be loaded over HTTP")] = ""
    lora_host_cache_size: Annotated[
        int,
        setting(
            "bytes of weights that came with requests which are kept in the run directory", ge=1, le=1 << 44
        ),
    ] = 1 << 30
    lora_host_rows: Annotated[
        int,
        setting(
            "the same as rows: ranks of all modules of the adapters, added up; goes before "
            "--lora-host-cache-size",
            ge=0,
        ),
    ] = 0
    lora_device_rows: Annotated[
        int, setting("rows of the adapters that lie on the device; 0: as --lora-device-percent says", ge=0)
    ] = 0
    lora_device_percent: Annotated[
        float,
        setting(
            "share, from 0 to 1, of the memory left beside weights and KV cache that adapters on the device "
            "take; 0: what --max-loras of --max-lora-rank need",
            ge=0.0,
            le=1.0,
        ),
    ] = 0.0
    lora_page_rank: Annotated[
        int,
        setting("an adapter of this rank on all modules takes one page of the caches", ge=1, le=512),
    ] = 8
    lora_load_workers: Annotated[
        int, setting("threads that bring adapters to the device, beside the steps", ge=1, le=16)
    ] = 1


class NodeSettings(AdapterSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of a launch over several machines."""

    TITLE: ClassVar[str] = "several machines"

    executor: Annotated[
        Literal["auto", "local", "nodes", "ray"],
        setting(
            "where the ranks are: local: on this machine; nodes: on --nnodes machines, of which each runs "
            "this command, or on those that its starter's environment names; ray: on --nnodes machines, of "
            "which Ray finds the others; auto: nodes where there are several (docs/multi_node.md)"
        ),
    ] = "auto"
    nnodes: Annotated[
        int, setting("machines that serve the model together (docs/multi_node.md)", "-n", ge=1, le=64)
    ] = 1
    node_rank: Annotated[
        int,
        setting("which of them this one is; 0 has the HTTP server and all else but ranks", "-r", ge=0, le=63),
    ] = 0
    dist_addr: Annotated[
        str,
        setting(
            "address of node 0, HOST or HOST:PORT, at which the others meet it",
            "--dist-init-addr",
            "--master-addr",
        ),
    ] = ""
    dist_port: Annotated[
        int, setting("port of --dist-addr where that names none", "--master-port", ge=1, le=65000)
    ] = 29500
    node_addr: Annotated[
        str,
        setting(
            "address of this machine that the others reach it by; default: that of --trusted-network, or the "
            "one that leads to --dist-addr"
        ),
    ] = ""
    node_key: Annotated[
        str,
        setting(
            "file with the secret that all nodes have; default, on loopback only: one that this user's "
            "launches share"
        ),
    ] = ""
    trusted_network: Annotated[
        str,
        setting(
            "interface of a network on which nobody listens whom you do not trust: tensors go over it "
            "unencrypted (docs/multi_node.md)"
        ),
    ] = ""


class RecordedStepSettings(NodeSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of GPUs and of recorded steps."""

    TITLE: ClassVar[str] = "GPUs and recorded steps"

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
