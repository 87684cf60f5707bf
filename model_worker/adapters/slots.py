"""AdapterSlots: loads adapters into device slots while steps are computed, and reports the results.

    load      the slot is emptied, in the order of the plans; niced threads read and pack the weights
    answers   finished adapters are installed, in the order of the plans, and reported

So a plan that is launched after an answer uses the adapter, and no forward waits for the disk.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model_worker.adapters.tensors import (
    AdapterFile,
    adapted_modules,
    check_fit,
    largest_row_bytes,
    read_parts,
)
from model_worker.device.base import Device, Ticket
from model_worker.layers.linear import Linear
from model_worker.memory.prompt_tables import PromptTables
from model_worker.models.transformer import CausalLM
from model_worker.ops.adapters import PackedAdapter
from runtime.base.errors import InvalidRequest, ModelError
from runtime.checkpoint.adapters.lora_config import read_adapter, refused, version_of
from runtime.checkpoint.adapters.prompt_table import TENSOR, read_prompt_table
from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.plan import AdapterFailed, AdapterLoaded, AdapterRef, LoadAdapter

logger = logging.getLogger(__name__)

NICENESS = 15
"""Niceness of the loading threads. It gives them 1/29 of a core that a step wants too, so steps take 3 to 4 %
longer while an adapter is loaded.
"""

AdapterAnswer = AdapterLoaded | AdapterFailed
Packed = Mapping[Linear, PackedAdapter] | Tensor
"""Packed weights of an adapter or a prompt table, ready to be installed."""


class _Load(NamedTuple):
    """A load that was asked for. A later load of the same slot, or a drop, cancels it."""

    asked: LoadAdapter
    emptied: Ticket[None]
    """Ticket of the emptying: later steps, and once it is done all steps, no longer read the slot."""
    began_s: float


class AdapterSlots:
    """Loads adapters into slots. Used in the thread that launches plans."""

    def __init__(
        self,
        model: CausalLM,
        device: Device,
        *,
        max_rank: int,
        tables: PromptTables | None = None,
        rank: int = 0,
        num_threads: int = 1,
    ) -> None:
        """model: a bound model that takes adapters. tables: its prompt tables, or None. rank: number of this
        rank. num_threads: number of loads at the same time.
        """
        self.max_rows = 0
        """Maximum sum of the ranks of all modules of all adapters that their share of the memory can hold; 0:
        they have no share.
        """
        self._model = model
        self._modules = adapted_modules(model)
        self._tables = tables
        self._device = device
        self._max_rank = max_rank
        self._rank = rank
        self._current: dict[int, _Load] = {}
        self._read: queue.SimpleQueue[tuple[_Load, Packed | str]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num_threads, "adapters")
        num_own = torch.get_num_threads()
        all_begun = threading.Barrier(num_threads + 1)
        for _ in range(num_threads):
            self._threads.submit(_be_nice, all_begun)
        all_begun.wait()
        torch.set_num_threads(num_own)  # for later threads, which take the number set last
        self.on_news: Callable[[], None] = lambda: None
        """Called, in another thread, when there is an answer."""

    @property
    def num_modules(self) -> int:
        """Number of the checkpoint's linear layers that an adapter may change."""
        return len(self._modules)

    @property
    def row_bytes(self) -> int:
        """Maximum number of bytes that an adapter of rank 1 takes for one of these layers, over all ranks."""
        return largest_row_bytes(self._model, self._modules)

    def check(self, path: Path) -> None:
        """Raise InvalidRequest for an adapter that does not fit the model, as far as shapes show."""
        check_fit(self._model, self._modules, read_adapter(path, self._max_rank))

    def load(self, asked: LoadAdapter) -> None:
        """Start a load; see LoadAdapter. A load that is replaced or dropped before it is ready is not
        answered.
        """
        emptied = self._install(asked.slot, {})
        self._current[asked.slot] = load = _Load(asked, emptied, time.monotonic())
        self._threads.submit(self._read_and_pack, load)

    def drop(self, slot: int) -> None:
        """Free the memory of a slot; see DropAdapter."""
        self._current.pop(slot, None)
        self._install(slot, {})

    def answers(self) -> list[AdapterAnswer]:
        """Return and clear the results of loads since the last call. Never blocks."""
        answers: list[AdapterAnswer] = []
        while not self._read.empty():
            load, packed = self._read.get()
            if self._current.get(load.asked.slot) is load:
                answers.append(self._finish(load, packed))
        return answers

    def close(self) -> None:
        """Start none of the loads that are still waiting."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _finish(self, load: _Load, packed: Packed | str) -> AdapterAnswer:
        slot, ref, number = load.asked.slot, load.asked.ref, load.asked.number
        if isinstance(packed, str):
            del self._current[slot]
            return AdapterFailed(self._rank, slot, ref.version, packed[:MAX_SHORT_CHARS], number)
        self._install(slot, packed)
        parts = (packed,) if isinstance(packed, Tensor) else packed.values()
        num_bytes = sum(each.nbytes if isinstance(each, Tensor) else each.num_bytes for each in parts)
        load_s = time.monotonic() - load.began_s
        logger.info("loaded adapter %s: %.1f MiB in %.2f s", ref.name, num_bytes / (1 << 20), load_s)
        return AdapterLoaded(self._rank, slot, ref.version, num_bytes, load_s, number)

    def _install(self, slot: int, packed: Packed) -> Ticket[None]:
        def install() -> None:
            table = packed if isinstance(packed, Tensor) else None
            adapted = {} if isinstance(packed, Tensor) else packed
            if self._tables is not None:
                self._tables.install(slot, table)
            for _, layer in self._modules.values():
                assert layer.adapters is not None, "a model that takes adapters"
                layer.adapters.install(slot, adapted.get(layer))

        return self._device.forward_stream.launch(install)

    def _read_and_pack(self, load: _Load) -> None:
        """Read an adapter's files and pack its weights for the device, in a loading thread."""
        ref = load.asked.ref
        result: Packed | str
        try:
            load.emptied.wait()
            result = self._packed(load)
        except InvalidRequest as error:
            result = error.message
        except ModelError as error:
            result = str(error)
        except OSError as error:
            result = f"the adapter in {ref.path} cannot be read: {error.strerror}"
        except Exception as error:  # the worker serves other requests, and the scheduler waits for an answer
            logger.exception("an adapter cannot be loaded")
            result = f"the adapter in {ref.path} cannot be loaded: {type(error).__name__}: {error}"
        self._read.put((load, result))
        self.on_news()

    @torch.inference_mode()
    def _packed(self, load: _Load) -> Packed:
        ref = load.asked.ref
        if ref.num_virtual:
            return self._packed_table(ref)
        config = read_adapter(Path(ref.path), self._max_rank)
        check_fit(self._model, self._modules, config)
        packed: dict[Linear, PackedAdapter] = {}
        for layer, parts in read_parts(self._model, self._modules, config):
            assert layer.adapters is not None
            packed[layer] = layer.adapters.pack(load.asked.slot, parts)
        _check_unchanged(ref, config.version)
        return packed

    def _packed_table(self, ref: AdapterRef) -> Tensor:
        assert self._tables is not None, "a prompt table for a model that takes none"
        config = read_prompt_table(Path(ref.path))
        with AdapterFile(config.weights) as file:
            table = file.read(TENSOR)
        if config.width != self._tables.width:
            reason = f"{TENSOR} has vectors of {config.width}, and the model's are of {self._tables.width}"
            raise refused(config.path, reason)
        if not torch.isfinite(table).all():
            raise refused(config.path, f"{TENSOR} has values that are no finite numbers")
        _check_unchanged(ref, config.version)
        return self._tables.pack(table)


def _check_unchanged(ref: AdapterRef, version: str) -> None:
    if ref.version not in ("", version) or version_of(Path(ref.path)) != version:
        raise InvalidRequest(f"the files in {ref.path} have changed since the adapter was asked for")


def _be_nice(all_begun: threading.Barrier) -> None:
    """Lower the priority of this loading thread, and let it use one core at most."""
    torch.set_num_threads(1)
    own = threading.get_native_id()
    # A process that is nicer already may not lower it, and its threads should not come before it.
    os.setpriority(os.PRIO_PROCESS, own, max(NICENESS, os.getpriority(os.PRIO_PROCESS, own)))
    all_begun.wait()
