"""ModelConfig: what a checkpoint's config.json and generation_config.json say, checked and in one vocabulary.

Knows the architectures that are served and where their specs live, as import strings. Opens no weights,
imports no torch, runs no code that comes with a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec

from runtime.errors import ModelError

T = TypeVar("T")
PositiveInt = Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
RopeType = Literal["default", "linear", "llama3"]
DType = Literal["float32", "bfloat16", "float16"]


class Architecture(NamedTuple):
    """One row of the table of architectures.

    windowed: which layers a configured sliding window holds for. "upper" is those from max_window_layers on,
    and only when use_sliding_window is set; a layer_types list in config.json goes before either.
    """

    spec: str  # import string of its ModelSpec
    windowed: Literal["none", "all", "upper"]


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("model_worker.models.llama:SPEC", windowed="none"),
    "MistralForCausalLM": Architecture("model_worker.models.mistral:SPEC", windowed="all"),
    "Qwen2ForCausalLM": Architecture("model_worker.models.qwen2:SPEC", windowed="upper"),
    "Qwen3ForCausalLM": Architecture("model_worker.models.qwen3:SPEC", windowed="upper"),
}


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding. `factor` belongs to linear and llama3, the fields after it to llama3 alone."""

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


class ModelConfig(msgspec.Struct, frozen=True):
    """One checkpoint's shape. Sizes count elements; max_position_embeddings is the context in tokens."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]  # per layer: keys a token sees, itself included; None sees all
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    dtype: DType
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults

    @classmethod
    def from_path(cls, path: Path) -> ModelConfig:
        """Read the checkpoint in the directory `path`.

        Raises: ModelError, saying what to do, when the directory or its config.json is missing or unreadable,
        or asks for something that is not served.
        """
        if not path.is_dir():
            raise ModelError(f"Model directory {path} does not exist. Pass the path of a local checkpoint.")
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json, so it is not a checkpoint directory.")
        config = _read(path / "config.json", _ConfigFile)
        generation = _GenerationFile()
        if (path / "generation_config.json").is_file():
            generation = _read(path / "generation_config.json", _GenerationFile)
        return _build(config, generation)

    @property
    def spec(self) -> str:
        """Import string of the architecture's ModelSpec."""
        return ARCHITECTURES[self.architecture].spec

    def kv_bytes_per_token(self, dtype_size: int) -> int:
        """Bytes of KV cache one token takes over all layers, with elements of dtype_size bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_size


class _RopeParameters(msgspec.Struct):
    """rope_parameters (or the older rope_scaling) as files spell it; an unknown key is an error."""

    rope_theta: PositiveFloat | None = None
    rope_type: str | None = None
    type: str | None = None  # the older name of rope_type
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    partial_rotary_factor: float | None = None


class _ConfigFile(msgspec.Struct, kw_only=True):
    """The keys of config.json that are read. An absent one means what the architectures mean by it."""

    architectures: list[str] | None = None
    model_type: str = ""
    auto_map: msgspec.Raw | None = None
    quantization_config: msgspec.Raw | None = None
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: float | None = None
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None


class _GenerationFile(msgspec.Struct):
    """The keys of generation_config.json that are read."""

    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    repetition_penalty: PositiveFloat | None = None


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _build(config: _ConfigFile, generation: _GenerationFile) -> ModelConfig:
    architecture = _architecture(config)
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({config.num_attention_heads}) is not a multiple of "
            f"num_key_value_heads ({num_kv_heads})."
        )
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    if config.hidden_act != "silu":
        raise ModelError(
            f"config.json: hidden_act {config.hidden_act!r} is not supported; it must be 'silu'."
        )
    bos = generation.bos_token_id if generation.bos_token_id is not None else config.bos_token_id
    return ModelConfig(
        model_type=config.model_type,
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope=_rope(config),
        sliding_windows=_sliding_windows(config, ARCHITECTURES[architecture]),
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        hidden_act=config.hidden_act,
        dtype=_dtype(config.dtype or config.torch_dtype),
        bos_token_id=bos,
        eos_token_ids=_eos_token_ids(generation.eos_token_id, config.eos_token_id),
        sampling=SamplingDefaults(
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            repetition_penalty=generation.repetition_penalty,
        ),
    )


def _architecture(config: _ConfigFile) -> str:
    """The architecture that serves the checkpoint. Refuses one that needs its own code or is quantised."""
    supported = ", ".join(ARCHITECTURES)
    if config.auto_map is not None:
        raise ModelError(
            "config.json has auto_map: the model comes with its own code, which is never run. "
            f"Supported architectures: {supported}."
        )
    if config.quantization_config is not None:
        raise ModelError(
            "config.json has quantization_config: quantised checkpoints are not supported. "
            "Use the checkpoint in bfloat16, float16 or float32."
        )
    names = config.architectures or []
    for name in names:
        if name in ARCHITECTURES:
            return name
    found = ", ".join(names) or f"none (model_type {config.model_type!r})"
    raise ModelError(f"Architecture {found} is not supported. Supported architectures: {supported}.")


def _rope(config: _ConfigFile) -> RopeConfig:
    """Rotary parameters from rope_parameters, or from the older rope_theta and rope_scaling."""
    spelled = config.rope_parameters or config.rope_scaling or {}
    rope_type = spelled.get("rope_type", spelled.get("type", "default"))
    if rope_type not in get_args(RopeType):
        known = ", ".join(get_args(RopeType))
        raise ModelError(f"config.json: rope type {rope_type!r} is not supported. Supported: {known}.")
    try:
        raw = msgspec.convert(spelled, _RopeParameters)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: rope_parameters: {error}") from error
    unknown = sorted(spelled.keys() - _RopeParameters.__struct_fields__)
    if unknown:
        raise ModelError(f"config.json: rope_parameters has unsupported keys: {', '.join(unknown)}.")
    for partial in (raw.partial_rotary_factor, config.partial_rotary_factor):
        if partial not in (None, 1.0):
            raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; it must be 1.")
    theta = raw.rope_theta or config.rope_theta or 10000.0
    if rope_type == "default":
        return RopeConfig(theta)
    needed = ["factor"]
    if rope_type == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    values = {name: getattr(raw, name) for name in needed}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ModelError(f"config.json: rope type {rope_type} lacks {', '.join(missing)}.")
    if rope_type == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise ModelError("config.json: rope high_freq_factor must be greater than low_freq_factor.")
    return RopeConfig(theta, rope_type, **values)


def _sliding_windows(config: _ConfigFile, architecture: Architecture) -> tuple[int | None, ...]:
    """The window of each layer; None for full attention."""
    num_layers = config.num_hidden_layers
    kinds = config.layer_types
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(f"config.json: layer_types {', '.join(unknown)} are not supported.")
        if len(kinds) != num_layers:
            raise ModelError(f"config.json: {len(kinds)} layer_types for {num_layers} layers.")
    window = config.sliding_window
    enabled = {"none": False, "all": True, "upper": config.use_sliding_window}[architecture.windowed]
    if window is None or not enabled:
        return (None,) * num_layers
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.max_window_layers if architecture.windowed == "upper" else 0
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _dtype(name: str | None) -> DType:
    """The checkpoint's dtype; a file that does not say means float32."""
    bare = (name or "float32").removeprefix("torch.")
    if bare not in get_args(DType):
        known = ", ".join(get_args(DType))
        raise ModelError(f"config.json: dtype {name!r} is not supported. Supported: {known}.")
    return cast(DType, bare)


def _eos_token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """The ids that end a sequence: those of every source, the first source's first, none twice."""
    ids: dict[int, None] = {}
    for source in sources:
        if source is not None:
            ids.update(dict.fromkeys([source] if isinstance(source, int) else source))
    return tuple(ids)
