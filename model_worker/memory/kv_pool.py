"""MHATokenToKVPool: the KV cache of one device, addressed by slot. Knows pages; knows no row, no request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DUMMY_PAGE = 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of the KV cache: one key and one value for each head of a token, in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    attention_window: int = 0
    """Number of a sequence's last tokens that are read again, including the newest; 0: all."""
    first_layer: int = 0
    """Number of the first layer. Earlier layers belong to other pipeline stages."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class MHATokenToKVPool:
    """Keys and values of every layer, one slot per token.

    Page 0 is the dummy page: padding writes there, and no row attends to it. Pages 1 .. num_pages hold
    tokens. A slot is page * page_size + offset. The memory is uninitialised apart from the dummy page: a slot
    must be stored before it is read.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        first_layer: int = 0,
    ) -> None:
        """Allocate the memory. first_layer: as in KVLayout."""
        self._first_layer = first_layer
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        self._k = torch.empty(shape, dtype=dtype, device=device)
        self._v = torch.empty(shape, dtype=dtype, device=device)
        for buffer in (self._k, self._v):
            buffer[:, DUMMY_PAGE * page_size : (DUMMY_PAGE + 1) * page_size].zero_()
        self._layers = list(zip(self._k.unbind(0), self._v.unbind(0), strict=True))

    def layer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return the key and the value buffer of one layer, each [num_slots, num_kv_heads, head_dim]."""
        return self._layers[layer_id - self._first_layer]

    def store(self, layer_id: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k and v [T, num_kv_heads, head_dim] of one layer to slots [T] int64, in stream order."""
        k_buffer, v_buffer = self.layer(layer_id)
        k_buffer.index_copy_(0, slots, k)
        v_buffer.index_copy_(0, slots, v)

    def copy_pages(self, src: Tensor, dst: Tensor) -> None:
        """Copy pages src [N] onto pages dst [N] (int64) in every layer; src and dst must be disjoint."""
        for buffer in (self._k, self._v):
            # As bytes: torch has no such copies of float8.
            buffer = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
            pages = buffer.view(buffer.shape[0], -1, self.page_size, *buffer.shape[2:])
            pages.index_copy_(1, dst, pages.index_select(1, src))

    def bytes_per_page(self) -> int:
        """Return the bytes of one page over all layers, keys and values."""
        return 2 * self._k[:, : self.page_size].nelement() * self._k.element_size()
