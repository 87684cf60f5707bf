"""CausalLM: the one decoder behind every family, built from a ModelConfig and a ModelSpec.

Module names follow the checkpoints: a parameter's name is its tensor's name. Knows no file and no plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model_worker.attention.base import AttentionBackend, widest_window
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.taps import StepTaps
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.kernels.combine import CombineLike
from model_worker.layers.bound import BoundLayer
from model_worker.layers.embedding import LMHead, TokenEmbedding
from model_worker.layers.linear import Linear
from model_worker.layers.norm import NormLayer
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.memory.kv_pool import KVLayout, MHATokenToKVPool
from model_worker.models.attention import SelfAttention
from model_worker.models.decoder_layer import LAYOUTS, Update
from model_worker.models.feed_forward import SparseMLP
from model_worker.models.parts import Parts
from model_worker.models.spec import ModelSpec
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops, TakeRows
from model_worker.quant.base import QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.checkpoint.model_config import ModelConfig
from runtime.sampling.additional_outputs import HIDDEN_STATES, LAYER_OUTPUTS


class StageOutput(NamedTuple):
    """Hidden states that a pipeline stage gives the next one, each [T, hidden_size]."""

    residual: Tensor
    update: Tensor
    """To be added to it; its norm is done."""


class Decoder(BoundLayer):
    """Embedding, layers and the final norm; of a pipeline stage what it has of them."""

    _take: TakeRows
    embed_tokens: TokenEmbedding
    """Stages behind the first have none, but for the last one where it is the head, too."""
    norm: NormLayer
    """The last stage alone has one."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        config, spec, device = parts.config, parts.spec, parts.device
        multiplier = config.embedding_multiplier
        if spec.scaled_embedding:
            multiplier *= math.sqrt(config.hidden_size)
        self.is_first, self.is_last = parts.is_first, parts.is_last
        if parts.is_first or (parts.is_last and config.tie_word_embeddings):
            self.embed_tokens = parts.token_embedding(multiplier)
        layer_type = LAYOUTS[spec.layout]
        self.layers = nn.ModuleList()
        for layer_id in parts.own_layers:
            self.layers.add_module(str(layer_id), layer_type(parts, layer_id))
        if parts.is_last:
            self.norm = parts.norm(config.hidden_size)
        self._like = torch.empty(0, config.hidden_size, dtype=parts.dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.window_rotary: RotaryEmbedding | None = None
        if config.window_rope is not None:
            self.window_rotary = RotaryEmbedding(config.window_rope, config.head_dim, device)
        self._has_window = [window is not None for window in config.sliding_windows]

    def bind(self, ops: Ops) -> None:
        """See BoundLayer; its layers are bound by themselves."""
        self._take = ops.take_rows(self._like)
        for rotary in (self.rotary, self.window_rotary):
            if rotary is not None:
                rotary.bind(ops)

    def forward(
        self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend
    ) -> Tensor | StageOutput:
        """The final hidden states [W, hidden_size] of the tokens at batch.output_indices. A pipeline stage
        but the first goes on from batch.arrived, in place, as StageOutput has it.
        """
        update: Update | None = None
        if batch.arrived is not None:
            residual, update = batch.arrived[0], Update(batch.arrived[1])
        else:
            assert self.is_first, "a stage with nothing from the one before"
            residual = self.embed_tokens(batch.input_ids)
            if batch.virtual is not None:
                where, vectors = batch.virtual
                residual[where] = vectors
        cos_sin = window_cos_sin = self.rotary.cos_sin(batch.positions)
        if self.window_rotary is not None:
            window_cos_sin = self.window_rotary.cos_sin(batch.positions)

        def attend(attention: SelfAttention, hidden: Tensor) -> Tensor:
            turns = window_cos_sin if self._has_window[attention.layer.layer_id] else cos_sin
            attended: Tensor = attention(hidden, turns, batch, kv_pool, backend)
            return attended

        taps = batch.taps
        for layer_id, layer in enumerate(self.layers):
            if taps is not None and (name := f"{HIDDEN_STATES}:{layer_id}") in taps.names:
                taps.take(name, _stream(taps, residual, update))
            update = layer(residual, update, attend)
        assert update is not None, "a model has at least one layer"
        if not self.is_last:
            value = update.value if update.norm is None else update.norm(update.value)
            return StageOutput(residual, value)
        wanted = batch.output_indices
        if wanted is not None:
            residual = self._take(residual, wanted)
            update = update._replace(value=self._take(update.value, wanted))
        final: Tensor = self.norm.add_and_norm(residual, *update)
        if taps is not None:
            for name in {HIDDEN_STATES, f"{HIDDEN_STATES}:{len(self.layers)}"} & taps.names:
                taps.take_outputs(name, final)
        return final


def _stream(taps: StepTaps, residual: Tensor, update: Update | None) -> Tensor:
    """Rows of the residual stream with an update that the next layer adds to it in place."""
    rows = taps.pick(residual)
    if update is None:
        return rows
    added = taps.pick(update.value)
    return rows + (added if update.norm is None else update.norm(added))


class CausalLM(nn.Module):
    """A decoder with a language-model head. Weights are uninitialised until the loader fills them."""

    _combine: CombineLike
    lm_head: LMHead
    """The last pipeline stage alone has one."""
    _rows: RowAdapters | None = None
    _taps: StepTaps | None = None
    """Taps of the forward that runs."""
    stays_on_device = True
    """On a GPU its forward reads nothing on the host, so it can be recorded as a CUDA graph."""

    def __init__(
        self,
        config: ModelConfig,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: RankGroup = SOLO,
        quant: QuantMethod = UNQUANTIZED,
        layers: range = range(0),
    ) -> None:
        """group: the ranks that the model is cut for; this one's part is built. quant: of linear layers.
        layers: of this pipeline stage; nothing: all.
        """
        super().__init__()
        self.config = config
        self.spec = spec
        self.dtype = dtype
        self._quant = quant
        parts = Parts(config, spec, dtype, device, group, quant, layers)
        windows = [config.attention_window(layer_id) for layer_id in range(config.num_layers)]
        own = parts.own_layers
        self.kv_layout = KVLayout(
            len(own), parts.num_kv_heads, config.head_dim, widest_window(windows), own.start
        )
        self.model = Decoder(parts)
        self.is_last = parts.is_last
        if parts.is_last:
            self.lm_head = parts.lm_head(self.model.embed_tokens if config.tie_word_embeddings else None)

    def take_adapters(self, rows: RowAdapters, max_rank: int) -> None:
        """Compute rows with adapters of linear layers, of that rank at most; before it is bound."""
        self._rows = rows
        for layer in self.adapted_layers().values():
            layer.take_adapters(rows, max_rank)

    def tap(self, names: Collection[str]) -> None:
        """Hand over what parts of layers give, of those that are named; once."""
        for layer_id, layer in enumerate(self.model.layers):
            for part in LAYER_OUTPUTS:
                if (name := f"{part}:{layer_id}") in names:
                    layer.get_submodule(part).register_forward_hook(self._hand_over(name))

    def _hand_over(self, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hand_over(module: nn.Module, inputs: object, output: Tensor) -> None:
            taps = self._taps
            if taps is not None and name in taps.names:
                taps.take(name, taps.pick(output))

        return hand_over

    def compress_head(self) -> None:
        """See LMHead.compress; an embedding whose head is another stage's becomes the rows that this has."""
        if self.is_last:
            self.lm_head.compress()
        elif self.model.is_first and self.config.tie_word_embeddings:
            LMHead(self.model.embed_tokens.weight, self._quant).compress()

    def adapted_layers(self) -> dict[str, Linear]:
        """Return the linear layers of attention and feed-forward, by their names here; experts are none."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, Linear) and not name.endswith(".router")
        }

    def bind(self, ops: Ops) -> None:
        """Compute by ops from now on; once, when the weights are loaded: some Ops rearrange them in place."""
        for module in reversed(list(self.modules())):  # what is made of other layers comes behind them
            if isinstance(module, BoundLayer):
                module.bind(ops)
        self._combine = ops.combine

    def batch_dependent(self) -> str:
        """A module whose sums may be rounded differently in another batch, by its name; empty: there is none.

        The C++ linear layers add in one order for any number of rows; torch's do not.
        """
        name: str
        for name, module in self.named_modules():
            match module:
                case Linear(product=computes) | LMHead(head=computes) | SparseMLP(mixture=computes):
                    if not computes.batch_invariant:
                        return name
        return ""

    def forward(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """Compute the batch's tokens, write their KV, return final hidden states [W, hidden_size].

        backend.prepare(batch) must have run. Row w of the result belongs to token batch.output_indices[w], or
        w without these; W may be 0. Call it under torch.inference_mode: no gradient is needed, and each
        operation gets cheaper.
        """
        if self._rows is not None:
            self._rows.prepare(batch)
        self._taps = batch.taps
        hidden: Tensor = self.model(batch, kv_pool, backend)
        return hidden

    def compute_stage(
        self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend
    ) -> StageOutput:
        """Like `forward`, on a pipeline stage that is not the last."""
        output: StageOutput = self.model(batch, kv_pool, backend)
        return output

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The head: hidden [n, hidden_size] -> logits [n, vocab_size] float32, in `out` if it is given; on
        ranks other than 0 no rows. The caller decides how many rows at a time, for they are large.
        """
        assert self.is_last, "another pipeline stage has the head"
        logits: Tensor = self.lm_head(hidden, out)
        multiplier, softcap = self.config.logits_multiplier, self.config.logits_softcap
        if multiplier == 1.0 and softcap is None:
            return logits
        return self._combine(logits, scale=multiplier, cap=softcap, out=logits)
