"""Names of a model's weights in a checkpoint, and the pieces of them that this rank has."""

from __future__ import annotations

from collections.abc import Iterator

from model_worker.layers.stored_weight import StoredWeight
from model_worker.layers.weight import Piece, Weight
from model_worker.loading.safetensors_file import Rename
from model_worker.models.attention import SelfAttention
from model_worker.models.transformer import CausalLM
from runtime.checkpoint.model_config import ModelConfig


def rename_of(config: ModelConfig) -> Rename | None:
    """Return the renaming of a multimodal checkpoint's tensors to the decoder's names; None for any other."""
    return None if config.text_part is None else config.text_part.decoder_name


def checkpoint_targets(model: CausalLM) -> dict[str, list[Piece]]:
    """Return every checkpoint tensor that the model needs, by name, with its pieces and the memory that they
    fill.
    """
    targets: dict[str, list[Piece]] = {}
    for own_name, weight in weights_of(model).items():
        for name, piece in targets_of(model, own_name, weight):
            targets.setdefault(name, []).append(piece)
    return targets


def targets_of(model: CausalLM, own_name: str, weight: Weight) -> Iterator[tuple[str, Piece]]:
    """Yield the results of Weight.targets with names in the checkpoint's spelling."""
    for name, piece in weight.targets(own_name):
        yield checkpoint_name(model, name), piece


def checkpoint_name(model: CausalLM, name: str) -> str:
    """Return a tensor's name in the checkpoint's spelling."""
    # A decoder that was saved without a head has the same names without the outer module.
    prefix = "" if model.config.has_head else "model."
    return model.spec.checkpoint_name(name).removeprefix(prefix)


def attention_layers(model: CausalLM) -> dict[str, SelfAttention]:
    """Return the attention module of each layer by its name in the checkpoint, in the order of layers."""
    modules = {name: each for name, each in model.named_modules() if isinstance(each, SelfAttention)}
    return {checkpoint_name(model, name): each for name, each in modules.items()}


def stored_weights(model: CausalLM) -> dict[str, StoredWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, StoredWeight)}


def weights_of(model: CausalLM) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for name, weight in model.named_parameters():
        assert isinstance(weight, Weight)
        weights[name] = weight
    return weights
