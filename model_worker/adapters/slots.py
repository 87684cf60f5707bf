"""AdapterSlots: loads adapters into slots of the device while steps are computed, and says what became of it.

    load      the slot is emptied in the order of the plans; a thread reads and packs, niced, one at a time
    answers   what is ready is installed in the order of the plans, and said

So a plan that is launched behind an answer computes with the adapter, and the forward waits for no disk.
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

from model_worker.adapters.tensors import adapted_modules, check_fit, read_parts
from model_worker.device.base import Device, Ticket
from model_worker.layers.linear import Linear
from model_worker.models.transformer import CausalLM
from model_worker.ops.adapters import PackedAdapter
from runtime.base.errors import InvalidRequest, ModelError
from runtime.checkpoint.adapters.lora_config import read_adapter, version_of
from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.plan import AdapterFailed, AdapterLoaded, LoadAdapter

logger = logging.getLogger(__name__)

NICENESS = 10

AdapterAnswer = AdapterLoaded | AdapterFailed
Packed = Mapping[Linear, PackedAdapter]


class _Load(NamedTuple):
    """A load that was asked for; a later one of its slot, or a drop, makes it void."""

    asked: LoadAdapter
    emptied: Ticket[None]
    """No step behind it, and once it is done no step at all, reads the slot."""
    began_s: float


class AdapterSlots:
    """Asked in the thread that launches plans."""

    def __init__(self, model: CausalLM, device: Device, *, max_rank: int, rank: int = 0) -> None:
        """model: one that takes adapters, and is bound. rank: this one, of those that have parts of it."""
        self._model = model
        self._modules = adapted_modules(model)
        self._device = device
        self._max_rank = max_rank
        self._rank = rank
        self._current: dict[int, _Load] = {}
        self._read: queue.SimpleQueue[tuple[_Load, Packed | str]] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "adapters")
        num_threads = torch.get_num_threads()
        self._thread.submit(_be_nice).result()
        torch.set_num_threads(num_threads)  # for threads to come, which take the last number that was set
        self.on_news: Callable[[], None] = lambda: None
        """Called in another thread when there is an answer."""

    def check(self, path: Path) -> None:
        """Raise InvalidRequest for an adapter that the model cannot be served with, as far as shapes tell."""
        check_fit(self._model, self._modules, read_adapter(path, self._max_rank))

    def load(self, asked: LoadAdapter) -> None:
        """See LoadAdapter; a load that is replaced or dropped before it is ready is not answered."""
        emptied = self._install(asked.slot, {})
        self._current[asked.slot] = load = _Load(asked, emptied, time.monotonic())
        self._thread.submit(self._read_and_pack, load)

    def drop(self, slot: int) -> None:
        """See DropAdapter."""
        self._current.pop(slot, None)
        self._install(slot, {})

    def answers(self) -> list[AdapterAnswer]:
        """Return what has become of loads since the last call. Never blocks."""
        answers: list[AdapterAnswer] = []
        while not self._read.empty():
            load, packed = self._read.get()
            if self._current.get(load.asked.slot) is load:
                answers.append(self._finish(load, packed))
        return answers

    def close(self) -> None:
        """Begin no load that has not begun."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _finish(self, load: _Load, packed: Packed | str) -> AdapterAnswer:
        slot, ref, number = load.asked.slot, load.asked.ref, load.asked.number
        if isinstance(packed, str):
            del self._current[slot]
            return AdapterFailed(self._rank, slot, ref.version, packed[:MAX_SHORT_CHARS], number)
        self._install(slot, packed)
        num_bytes = sum(each.num_bytes for each in packed.values())
        load_s = time.monotonic() - load.began_s
        logger.info("loaded adapter %s: %.1f MiB in %.2f s", ref.name, num_bytes / (1 << 20), load_s)
        return AdapterLoaded(self._rank, slot, ref.version, num_bytes, load_s, number)

    def _install(self, slot: int, packed: Packed) -> Ticket[None]:
        def install() -> None:
            for _, layer in self._modules.values():
                assert layer.adapters is not None, "a model that takes adapters"
                layer.adapters.install(slot, packed.get(layer))

        return self._device.forward_stream.launch(install)

    def _read_and_pack(self, load: _Load) -> None:
        """Read an adapter's files and lay its weights out for the device, in the thread of loads."""
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
        except Exception as error:  # the worker serves others, and the scheduler waits for an answer
            logger.exception("an adapter cannot be loaded")
            result = f"the adapter in {ref.path} cannot be loaded: {type(error).__name__}: {error}"
        self._read.put((load, result))
        self.on_news()

    @torch.inference_mode()
    def _packed(self, load: _Load) -> Packed:
        ref = load.asked.ref
        config = read_adapter(Path(ref.path), self._max_rank)
        check_fit(self._model, self._modules, config)
        packed: dict[Linear, PackedAdapter] = {}
        for layer, parts in read_parts(self._model, self._modules, config):
            assert layer.adapters is not None
            packed[layer] = layer.adapters.pack(load.asked.slot, parts)
        if ref.version not in ("", config.version) or version_of(config.path) != config.version:
            raise InvalidRequest(f"the files in {ref.path} have changed since the adapter was asked for")
        return packed


def _be_nice() -> None:
    """Take what others leave of the cores, and one at most."""
    torch.set_num_threads(1)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
