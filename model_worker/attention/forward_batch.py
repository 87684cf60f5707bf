"""ForwardBatch: inputs of one forward pass. Knows tokens, rows and pages; knows no request and no plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model_worker.attention.taps import StepTaps


@dataclass(slots=True)
class ForwardBatch:
    """The new tokens of B sequences, laid end to end (T in all), and where their KV is and goes.

    There are no phases: a sequence brings one token or many, after a cached prefix or none. A KV slot is
    page * page_size + offset in page; token i of a row lies in page page_table[row, i // page_size].
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, index of each token in its sequence
    out_slots: Tensor  # [T] int64, the KV slot each token's keys and values are written to
    query_start: list[int]  # [B + 1] on the host: sequence b owns tokens query_start[b] : query_start[b + 1]
    kv_lens: list[int]  # [B] on the host: tokens in the cache after this step, the new ones included
    rows: Tensor  # [B] int64, index into page_table
    page_table: Tensor  # [max_rows, max_pages] int32, the device table, addressed by row
    page_size: int  # tokens
    num_decodes: int  # each of the first num_decodes sequences has exactly one new token
    output_indices: Tensor | None  # [W] int64, tokens whose final hidden states are wanted; None: all
    rows_repeat: bool = False  # a row may occur several times among the decodes, for consecutive tokens
    decode_lens: Tensor | None = None  # [num_decodes] int64, kv_lens on the device; None: see positions
    adapter_rows: Tensor | None = None  # [T] int64, each token's row; None: no row has an adapter
    attn_metadata: object | None = None  # set and read by the attention backend only
    arrived: tuple[Tensor, Tensor] | None = None  # see Decoder.forward; set in later pipeline stages
    virtual: tuple[Tensor, Tensor] | None = None  # virtual tokens: their places, and their vectors
    taps: StepTaps | None = None  # receives named tensors of the model; None: none are needed

    @property
    def batch_size(self) -> int:
        """Number of sequences, B."""
        return len(self.kv_lens)
