"""CausalLM: the decoder behind every family, built from a ModelConfig and a ModelSpec. Module names follow
the checkpoints: a parameter's name is its tensor's name. Knows no file and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn

from model_worker.attention.base import AttentionBackend, widest_window
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.taps import StepTaps
from model_worker.kernels.combine import CombineLike
from model_worker.layers.bound import BoundLayer
from model_worker.layers.embedding import LMHead
from model_worker.layers.linear import Linear
from model_worker.memory.kv_pool import KVLayout, MHATokenToKVPool
from model_worker.models.decoder import Decoder, StageOutput
from model_worker.models.feed_forward import SparseMLP
from model_worker.models.parts import Parts
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from runtime.sampling.additional_outputs import LAYER_OUTPUTS


class CausalLM(nn.Module):
    """A decoder with a language-model head. Weights are uninitialised until the loader fills them."""

    _combine: CombineLike
    lm_head: LMHead
    """Language-model head, on the last pipeline stage only."""
    _rows: RowAdapters | None = None
    _taps: StepTaps | None = None
    """Collector of additional outputs during a forward, or None."""
    stays_on_device = True
    """True if on a GPU its forward reads nothing on the host, so it can be recorded as a CUDA graph."""

    def __init__(self, parts: Parts) -> None:
        """Build this rank's part of the layers of this pipeline stage."""
        super().__init__()
        config = parts.config
        self.config = config
        self.spec = parts.spec
        self.dtype = parts.dtype
        self._quant = parts.quant
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
        """Enable adapters of linear layers for these rows, of rank max_rank at most. Call it
        before `bind`.
        """
        self._rows = rows
        for layer in self.adapted_layers().values():
            layer.take_adapters(rows, max_rank)

    def tap(self, names: Collection[str]) -> None:
        """Deliver the outputs of the named parts of layers in each forward that asks for them. Call
        it once.
        """
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
        """Convert the head's weight (see LMHead.compress). If the head is on another stage, the embedding
        gets the rows of the converted weight.
        """
        if self.is_last:
            self.lm_head.compress()
        elif self.model.is_first and self.config.tie_word_embeddings:
            LMHead(self.model.embed_tokens.weight, self._quant).compress()

    def adapted_layers(self) -> dict[str, Linear]:
        """Return the linear layers of attention and feed-forward by name, without experts."""
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, Linear) and not name.endswith(".router")
        }

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on. Call it once, when the weights are loaded: some Ops rearrange
        them in place.
        """
        for module in reversed(list(self.modules())):  # containers come after their layers
            if isinstance(module, BoundLayer):
                module.bind(ops)
        self._combine = ops.combine

    def batch_dependent(self) -> str:
        """Return the name of a module whose sums may be rounded differently in another batch; empty if there
        is none. The C++ linear layers add in one order for any number of rows; torch's do not.
        """
        name: str
        for name, module in self.named_modules():
            match module:
                case Linear(product=computes) | LMHead(head=computes) | SparseMLP(mixture=computes):
                    if not computes.batch_invariant:
                        return name
        return ""

    def forward(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """Compute the batch's tokens, write their KV, and return final hidden states [W, hidden_size].

        backend.prepare(batch) must have run. Row w of the result belongs to token batch.output_indices[w], or
        to token w without these; W may be 0. Call it under torch.inference_mode, which makes each operation
        cheaper.
        """
        if self._rows is not None:
            self._rows.prepare(batch)
        self._taps = batch.taps
        hidden: Tensor = self.model(batch, kv_pool, backend)
        return hidden

    def compute_stage(
        self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend
    ) -> StageOutput:
        """Do what `forward` does on a pipeline stage that is not the last."""
        output: StageOutput = self.model(batch, kv_pool, backend)
        return output

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply the head: return logits [n, vocab_size] float32 for hidden [n, hidden_size], in `out` if
        given; on ranks other than 0 without rows. The caller limits n, because logits are large.
        """
        assert self.is_last, "another pipeline stage has the head"
        logits: Tensor = self.lm_head(hidden, out)
        multiplier, softcap = self.config.logits_multiplier, self.config.logits_softcap
        if multiplier == 1.0 and softcap is None:
            return logits
        return self._combine(logits, scale=multiplier, cap=softcap, out=logits)
