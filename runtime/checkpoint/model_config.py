"""ModelConfig: a checkpoint's config.json, checked and translated for model specs.

Opens no weights, imports no torch, and runs no code that comes with a checkpoint. Knows no architecture by
name: the table says how each spells its config.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from runtime.base.errors import ConfigError, ModelError
from runtime.checkpoint.architectures import TEXT_PARTS, Architecture, MultimodalArchitecture
from runtime.checkpoint.checkpoint_config import CheckpointConfig, config_file
from runtime.checkpoint.config_file import (
    HEADLESS_SUFFIX,
    ConfigFile,
    ConfigKeys,
    OptionalKeys,
    has_spec,
    read_config,
    refuse_without_spec,
)
from runtime.checkpoint.own_spec import own_row
from runtime.checkpoint.rope_config import RopeConfig, RopeContext, read_rope

ModelImpl = Literal["auto", "native", "transformers"]
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]


class ExpertsConfig(msgspec.Struct, frozen=True):
    """A mixture of experts: each token goes to num_per_token of them, weighted by the router's softmax."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    renormalize: bool  # the chosen experts' weights sum to one


class ModelConfig(CheckpointConfig, frozen=True, kw_only=True):
    """Shape of one checkpoint's model. Sizes are in elements."""

    spec: str
    """Import string of the architecture's ModelSpec."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    window_rope: RopeConfig | None  # that of layers with a window, if it is another one
    sliding_windows: tuple[int | None, ...]  # per layer: keys a token sees, itself included; None sees all
    max_attention_window: int = 0  # the setting: limit of all windows; 0: as the checkpoint says
    attention_bias: bool
    attention_scale: float  # factor of the product of query and key
    attention_softcap: float | None
    qk_norm: bool
    mlp_bias: bool
    hidden_act: Activation
    experts: ExpertsConfig | None
    expert_layers: tuple[bool, ...]  # which layers have experts in place of one feed-forward layer
    embedding_multiplier: float
    residual_multiplier: float  # factor of the output of each half of a layer
    logits_multiplier: float
    logits_softcap: float | None  # after the multiplier

    @classmethod
    def from_path(
        cls, path: Path, context_length: int | None = None, model_spec: str = "", overrides: str = ""
    ) -> ModelConfig:
        """Read the checkpoint in the directory `path`.

        - context_length: the longest sequence to serve, if that is not the checkpoint's own; some rotary
          embeddings depend on it.
        - model_spec: import string of a spec or a row of the user's own, used instead of the table.
          overrides: as in CheckpointConfig.

        Raises ModelError, saying what to do, when the directory or its config.json is missing or unreadable,
        or asks for something that is not supported; ConfigError when model_spec names neither a spec nor a
        row.
        """
        keys = read_config(config_file(path), own_row(model_spec) if model_spec else None, overrides)
        return _build(CheckpointConfig.read(path, overrides), keys, context_length)

    @property
    def text_part(self) -> MultimodalArchitecture | None:
        """Parts of a multimodal checkpoint around its decoder; None for a plain decoder."""
        return TEXT_PARTS.get(self.architecture)

    def attention_window(self, layer_id: int) -> int | None:
        """Return the number of keys that a token sees in this layer, itself included; None: all."""
        own, limit = self.sliding_windows[layer_id], self.max_attention_window
        return min(own or limit, limit) if limit else own

    def layer_weights(self) -> list[int]:
        """Return the number of parameters of each layer. The embedding counts as part of the first layer, the
        head as part of the last.
        """
        hidden = self.hidden_size
        attention = 2 * hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        dense = sparse = 3 * hidden * self.intermediate_size
        if self.experts is not None:
            sparse = 3 * hidden * self.experts.intermediate_size * self.experts.num_experts
        weights = [attention + (sparse if has_experts else dense) for has_experts in self.expert_layers]
        for end in (0, -1):
            weights[end] += self.vocab_size * hidden
        return weights

    def attention_span(self) -> int:
        """Return the position at which a token takes twice as long to compute as the first one, by the
        multiplications of all layers. 0 if no layer sees all tokens, so that this never happens.
        """
        num_all_seeing = sum(self.attention_window(layer) is None for layer in range(self.num_layers))
        hidden = self.hidden_size
        linear = 2 * hidden * self.head_dim * (self.num_heads + self.num_kv_heads) * self.num_layers
        for has_experts in self.expert_layers:
            if has_experts and self.experts is not None:
                linear += 3 * hidden * self.experts.intermediate_size * self.experts.num_per_token
            else:
                linear += 3 * hidden * self.intermediate_size
        each_before = 2 * self.num_heads * self.head_dim * num_all_seeing
        return linear // each_before if each_before else 0

    def num_kv_heads_per_rank(self, num_ranks: int) -> int:
        """Return the number of KV heads of each rank. With fewer KV heads than ranks, several ranks have the
        same head.
        """
        return max(1, self.num_kv_heads // num_ranks)

    def check_ranks(self, num_ranks: int) -> None:
        """Check that the model can be divided among num_ranks ranks. Raises ConfigError, with the numbers, if
        it cannot.
        """
        sizes = {"num_attention_heads": self.num_heads}
        if not all(self.expert_layers):
            sizes["intermediate_size"] = self.intermediate_size
        if any(self.expert_layers) and self.experts is not None:
            sizes["the experts' intermediate_size"] = self.experts.intermediate_size
        for name, size in sizes.items():
            if size % num_ranks:
                raise ConfigError(f"tp_size: {num_ranks} ranks cannot share {name} {size} evenly")
        heads = self.num_kv_heads
        if heads % num_ranks and num_ranks % heads:
            raise ConfigError(
                f"tp_size: {num_ranks} ranks cannot share num_key_value_heads {heads}: neither is a multiple "
                "of the other"
            )


def _build(checkpoint: CheckpointConfig, keys: ConfigKeys, context_length: int | None) -> ModelConfig:
    config, optional = keys.file, keys.optional
    _refuse_what_is_not_built(config, optional, keys.row)
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({config.num_attention_heads}) is not a multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    rope, window_rope = _ropes(keys, head_dim, context_length)
    has_head = not checkpoint.architecture.endswith(HEADLESS_SUFFIX)
    return ModelConfig(
        **(msgspec.structs.asdict(checkpoint) | {"architecture": keys.architecture, "has_head": has_head}),
        spec=keys.row.spec,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings or not has_head,
        rope=rope,
        window_rope=window_rope,
        sliding_windows=_sliding_windows(keys),
        attention_bias=config.attention_bias,
        attention_scale=optional.attention_scale or (optional.attention_scale_dim or head_dim) ** -0.5,
        attention_softcap=optional.attention_softcap,
        qk_norm=optional.qk_norm,
        mlp_bias=config.mlp_bias,
        hidden_act=cast(Activation, config.hidden_act),
        experts=_experts(config, optional),
        expert_layers=_expert_layers(config, optional),
        embedding_multiplier=optional.embedding_multiplier,
        residual_multiplier=optional.residual_multiplier,
        logits_multiplier=optional.logits_multiplier or 1 / optional.logits_divisor,
        logits_softcap=optional.logits_softcap,
    )


def _refuse_what_is_not_built(config: ConfigFile, optional: OptionalKeys, row: Architecture) -> None:
    if config.hidden_act not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise ModelError(
            f"config.json: hidden_act {config.hidden_act!r} is not supported. Supported: {known}."
        )
    partial = config.partial_rotary_factor
    if partial not in (None, 1.0) and "rotary_fraction" not in row.keys:
        raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; it must be 1.")
    if optional.use_bidirectional_attention:
        raise ModelError("config.json: use_bidirectional_attention is not supported: decoders only.")


def _ropes(
    keys: ConfigKeys, head_dim: int, context_length: int | None
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rotary embedding of full attention layers, and that of sliding window layers if it differs.
    Reads both generations of config.json: rope_parameters, by kind of layer or not, and rope_theta,
    rope_scaling and a theta of its own for windows.
    """
    config, optional = keys.file, keys.optional
    context = RopeContext(
        theta=config.rope_theta,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        served_tokens=context_length or config.max_position_embeddings,
        original_max_position_embeddings=config.original_max_position_embeddings,
        partial_rotary_factor=optional.rotary_fraction,
        may_be_partial="rotary_fraction" in keys.row.keys,
        rotates_axes=keys.architecture in TEXT_PARTS and TEXT_PARTS[keys.architecture].rotates_axes,
    )
    spelled = config.rope_parameters or config.rope_scaling or {}
    if optional.window_rope_theta is None:
        return read_rope(spelled, context), None
    window_context = msgspec.structs.replace(context, theta=optional.window_rope_theta)
    if spelled.keys() <= {"full_attention", "sliding_attention"}:
        full, window = spelled.get("full_attention") or {}, spelled.get("sliding_attention") or {}
    else:
        full, window = spelled, {}
    return read_rope(full, context), read_rope(window, window_context)


def _sliding_windows(keys: ConfigKeys) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; None for full attention."""
    config = keys.file
    num_layers = config.num_hidden_layers
    kinds = config.layer_types
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(f"config.json: layer_types {', '.join(unknown)} are not supported.")
        if len(kinds) != num_layers:
            raise ModelError(f"config.json: {len(kinds)} layer_types for {num_layers} layers.")
    window, windowed = config.sliding_window, keys.row.windowed
    opted_in = config.use_sliding_window or windowed not in ("opted_in", "upper")
    if window is None or windowed == "none" or not opted_in:
        return (None,) * num_layers
    if kinds is not None:
        has_window = [kind == "sliding_attention" for kind in kinds]
    elif windowed == "upper":
        has_window = [layer >= config.max_window_layers for layer in range(num_layers)]
    elif windowed == "interleaved":
        pattern = keys.optional.sliding_window_pattern
        has_window = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        has_window = [True] * num_layers
    return tuple(window if has else None for has in has_window)


def _experts(config: ConfigFile, optional: OptionalKeys) -> ExpertsConfig | None:
    if not optional.num_experts:
        return None
    if optional.num_experts_per_tok > optional.num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok ({optional.num_experts_per_tok}) is more than the "
            f"{optional.num_experts} experts."
        )
    return ExpertsConfig(
        num_experts=optional.num_experts,
        num_per_token=optional.num_experts_per_tok,
        intermediate_size=optional.moe_intermediate_size or config.intermediate_size,
        renormalize=optional.norm_topk_prob,
    )


def _expert_layers(config: ConfigFile, optional: OptionalKeys) -> tuple[bool, ...]:
    dense = set(optional.dense_layers or ())
    return tuple(
        optional.num_experts > 0 and layer not in dense and (layer + 1) % optional.expert_layer_step == 0
        for layer in range(config.num_hidden_layers)
    )


def read_model_config(
    path: Path,
    model_impl: ModelImpl,
    context_length: int | None = None,
    model_spec: str = "",
    overrides: str = "",
) -> CheckpointConfig:
    """Read the checkpoint in `path`. Returns a ModelConfig if a spec computes it, which "auto" prefers.
    context_length, model_spec, overrides: see ModelConfig.from_path. Raises ModelError, also for models that
    the transformers library is not used for; ConfigError for an invalid model_spec.
    """
    if model_spec:
        if model_impl == "transformers":
            raise ConfigError(
                "model_spec: with --model-impl transformers no spec computes the model; give only one of them"
            )
        return ModelConfig.from_path(path, context_length, model_spec, overrides)
    if model_impl == "native" or (model_impl == "auto" and has_spec(config_file(path), overrides)):
        return ModelConfig.from_path(path, context_length, overrides=overrides)
    refuse_without_spec(config_file(path), overrides)
    return CheckpointConfig.read(path, overrides)
