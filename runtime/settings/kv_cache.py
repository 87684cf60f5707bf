"""The KV cache: how large it is, and what is kept in it."""

from __future__ import annotations

from typing import Annotated

from runtime.settings.cuda import CudaSettings
from runtime.settings.setting import setting


class KVCacheSettings(CudaSettings, frozen=True, forbid_unknown_fields=True):
    max_total_tokens: Annotated[
        int, setting("cap of the KV cache in tokens; 0: by memory alone, the smaller wins", ge=0, le=1 << 30)
    ] = 0
    mem_fraction_static: Annotated[
        float, setting("share of free memory for the KV cache", "--gpu-memory-utilization", gt=0.0, lt=1.0)
    ] = 0.85
    page_size: Annotated[int, setting("tokens per KV page", "--block-size", ge=1, le=256)] = 16
    disable_radix_cache: Annotated[
        bool, setting("do not keep KV of earlier requests", "--no-enable-prefix-caching")
    ] = False
    radix_eviction_policy: Annotated[
        str,
        setting(
            "what of the KV of earlier requests goes first: lru, lfu, fifo, filo, mru, priority, slru, or "
            "your own as package.module:Class"
        ),
    ] = "lru"
    max_attention_window: Annotated[
        int,
        setting(
            "tokens that a token sees in every layer, itself included, or the layer's own window if that is "
            "smaller: it changes what a longer text gives; 0: as the model's config says",
            ge=0,
            le=1 << 30,
        ),
    ] = 0
