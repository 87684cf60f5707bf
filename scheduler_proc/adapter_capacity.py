"""Sizes of the scheduler's LoRA parts, from the settings: adapter slots on the device, and the store of
adapters that came with requests.
"""

from __future__ import annotations

from runtime.base.errors import ConfigError
from runtime.settings.config import RuntimeConfig
from runtime.wire.plan import WorkerReady
from scheduler_proc.capacity.inline_store import InlineStore, KeptFiles
from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.executor import AdapterDevice
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.port import Port


def page_rows(config: RuntimeConfig, limits: WorkerReady) -> int:
    """Return the number of rank rows in one adapter page: enough for an adapter of rank --lora-page-rank on
    all modules, and for the largest adapter on one module.
    """
    return max(config.lora_page_rank * limits.num_adapted_modules, config.max_lora_rank)


def make_slots(
    config: RuntimeConfig, limits: WorkerReady, adapters: AdapterDevice | None, port: Port
) -> SlotPool:
    """Make the pool of adapter slots on the device; it is empty where no adapters are served. Raises
    ConfigError.
    """
    if adapters is None:
        return SlotPool(0)
    size = page_rows(config, limits)
    max_rows = config.lora_device_rows or limits.adapter_rows
    if max_rows:
        max_pages = max_rows // size
    else:
        max_pages = config.max_loras * -(-config.max_lora_rank * limits.num_adapted_modules // size)
    if not max_pages:
        name = "lora_device_rows" if config.lora_device_rows else "lora_device_percent"
        raise ConfigError(f"{name}: {max_rows} rows are less than a page, which has {size}")
    return SlotPool(config.max_loras, adapters, port.now_s, max_pages=max_pages, page_rows=size)


def make_inline_store(
    config: RuntimeConfig, limits: WorkerReady, lifecycle: Lifecycle, files: KeptFiles
) -> InlineStore | None:
    """Make the store of adapters whose weights come with requests; None where no adapters are served."""
    if not lifecycle.slots.num_slots:
        return None
    store = InlineStore(
        files,
        lambda: (each.path for req in lifecycle.requests.values() for each in req.contents),
        max_bytes=config.lora_host_cache_size,
        max_rows=config.lora_host_rows,
        page_rows=page_rows(config, limits),
    )
    lifecycle.slots.on_failed = store.note_failure
    return store
