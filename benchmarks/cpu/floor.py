"""Lower bounds for times on a machine. A decode step either reads the weights and the KV cache once, or
computes at peak rate, whichever takes longer; a prompt computes at peak rate. Knows no workload.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec


class Machine(NamedTuple):
    memory_gb_per_s: float
    """Rate at which all threads together read memory, in blocks of the model's size."""
    gflop_per_s: float
    """Matrix multiplication rate of all threads together, in bf16 or float32, whichever is faster."""


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes from a model's config.json: a decoder with gated MLPs, in bf16."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    @staticmethod
    def read(model_dir: Path) -> ModelShape:
        """Read the sizes from a model directory. Raises OSError, or msgspec.DecodeError for a model of
        another kind.
        """
        return msgspec.json.decode((model_dir / "config.json").read_bytes(), type=ModelShape)

    @property
    def query_size(self) -> int:
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        return self.num_attention_heads * head_dim

    @property
    def key_value_size(self) -> int:
        num_heads = self.num_key_value_heads or self.num_attention_heads
        return num_heads * (self.query_size // self.num_attention_heads)

    @property
    def num_layer_weights(self) -> int:
        attention = self.hidden_size * (2 * self.query_size + 2 * self.key_value_size)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    def step_s(self, machine: Machine, num_rows: int, context_len: int) -> float:
        """Return the seconds for one token of each of `num_rows` sequences of `context_len` tokens."""
        weights = self.num_layer_weights + self.num_head_weights
        # A key or value has two bytes, and is multiplied and added once for each query head.
        kv_bytes = num_rows * context_len * self.num_hidden_layers * 2 * self.key_value_size * 2
        attention_flops = num_rows * context_len * self.num_hidden_layers * 4 * self.query_size
        read_s = (2 * weights + kv_bytes) / machine.memory_gb_per_s / 1e9
        return max(read_s, (2 * weights * num_rows + attention_flops) / machine.gflop_per_s / 1e9)

    def prefill_s(self, machine: Machine, num_prompts: int, prompt_len: int) -> float:
        """Return the seconds for whole prompts, of which only the last token goes through the head."""
        attention_flops = 2 * self.num_hidden_layers * self.query_size * prompt_len**2
        flops = 2 * self.num_layer_weights * prompt_len + 2 * self.num_head_weights + attention_flops
        return num_prompts * flops / machine.gflop_per_s / 1e9


Floor: TypeAlias = Callable[[ModelShape, Machine], dict[str, float]]
"""Function that returns figures of bench_serving's results at the lower bound."""
