"""The model: what is loaded, and on what it runs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from runtime.settings.setting import setting


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    tokenizer: Annotated[
        str,
        setting("directory of the tokenizer, or owner/name; default: the model's", "--tokenizer-path"),
    ] = ""
    served_model_name: Annotated[
        str, setting("the name in /v1/models and replies; default: the model's directory name")
    ] = ""
    chat_template: Annotated[str, setting("file with a Jinja chat template that replaces the model's")] = ""
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
        Literal["auto", "safetensors", "dummy"], setting("where weights come from; dummy: random ones")
    ] = "auto"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        setting(
            "who computes the model: native (a spec of this project), transformers (any other decoder of "
            "that library, slower), auto: native where there is a spec"
        ),
    ] = "auto"
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
    context_length: Annotated[
        int,
        setting("longest sequence, prompt and output; 0: the model's", "--max-model-len", ge=0, le=1 << 22),
    ] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], setting("where the model runs")] = "auto"
    attention_backend: Annotated[
        str,
        setting(
            "auto, cpu_native (C++, compiled at the first start), triton and flashinfer (CUDA), "
            "torch_native, or your own as package.module:Class"
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
            "bfloat16 logits of a sequence are the same bits in any batch, chunks and after a retraction; "
            "refuses what cannot promise it"
        ),
    ] = False
    tp_size: Annotated[
        int,
        setting(
            "tensor-parallel ranks: processes that have a part of the model each (docs/tensor_parallel.md)",
            "--tp",
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
