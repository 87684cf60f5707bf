"""RankRing: a Ring whose model is divided among several ranks. Each is a thread that gets every plan."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import msgspec

from model_worker.device import make_device
from model_worker.distributed.group import RankGroup
from model_worker.executors.inproc import InprocExecutor
from model_worker.load_worker import load_worker
from model_worker.membership import Membership, join_folder
from model_worker.worker import ModelWorker
from runtime.settings.config import RuntimeConfig
from runtime.wire.plan import BatchPlan, SampleMasks
from tests.harness.models.rank_threads import JOIN_S, join_shared_memory
from tests.harness.ring.serving_ring import Ring, Setting


class RankRing(Ring):
    def __init__(self, model_path: Path, setting: Setting, num_ranks: int, folder: Path) -> None:
        folder.mkdir()
        self._num_ranks = num_ranks
        self._folder = folder
        super().__init__(model_path, setting)

    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        loaded: dict[int, ModelWorker] = {}
        groups: dict[int, RankGroup] = {}

        def load(rank: int) -> None:
            groups[rank] = join_shared_memory(self._folder, rank, self._num_ranks)
            # A follower's stream is its own thread here, whatever rank 0's is.
            device = make_device("cpu", threaded=setting.overlap or rank > 0)
            member = Membership.of_one_stage(groups[rank])
            loaded[rank] = load_worker(config, device, lambda: None, member)

        threads = [threading.Thread(target=load, args=(rank,)) for rank in range(self._num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        self._followers = FollowerThreads([loaded[rank] for rank in range(1, self._num_ranks)])
        self._groups = groups
        return InprocExecutor(
            loaded[0],
            max_in_flight=2 if setting.overlap else 1,
            followers=self._followers,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        super().close()
        for group in self._groups.values():
            group.close()


class StageRing(Ring):
    """A Ring whose model is cut into pipeline stages of `tp_size` ranks each, all of them threads."""

    def __init__(
        self,
        model_path: Path,
        setting: Setting,
        num_stages: int,
        folder: Path,
        *,
        tp_size: int = 1,
        **changes: Any,
    ) -> None:
        """changes: of the settings."""
        folder.mkdir()
        self._folder = folder
        self._changes = {"pp_size": num_stages, "tp_size": tp_size, "disable_cuda_graph": True, **changes}
        super().__init__(model_path, setting)

    def settings(self, config: RuntimeConfig) -> RuntimeConfig:
        return msgspec.structs.replace(config, **self._changes)

    def make_executor(self, config: RuntimeConfig, setting: Setting) -> InprocExecutor:
        loaded: dict[int, ModelWorker] = {}
        self._members: dict[int, Membership] = {}

        def load(rank: int) -> None:
            device = make_device("cpu", threaded=True)
            member = join_folder(config, rank, self._folder, device.torch_device, lambda: None)
            self._members[rank] = member
            loaded[rank] = load_worker(config, device, lambda: None, member)

        threads = [threading.Thread(target=load, args=(rank,)) for rank in range(config.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        self.workers = loaded
        (answers,) = [rank for rank, member in self._members.items() if member.layout.answers]
        self._followers = FollowerThreads([each for rank, each in loaded.items() if rank != answers])
        executor = InprocExecutor(
            loaded[answers],
            max_in_flight=config.max_steps_in_flight,
            followers=self._followers,  # type: ignore[arg-type]
        )
        executor.feeds_back = not config.disable_overlap_schedule
        return executor

    def close(self) -> None:
        super().close()
        for member in self._members.values():
            member.close()


class FollowerThreads:
    """Stand-in for `Ranks`, for workers of this process."""

    def __init__(self, workers: list[ModelWorker]) -> None:
        self._workers = workers
        self._inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in workers]
        self._threads = [
            threading.Thread(target=_follow, args=pair) for pair in zip(workers, self._inboxes, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def register(self, poller: object) -> None:
        """There is no process to look at."""

    def send(self, message: BatchPlan | SampleMasks, wait: object) -> None:
        for inbox in self._inboxes:
            inbox.put(message)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
        for worker in self._workers:
            worker.close()


def _follow(worker: ModelWorker, inbox: queue.SimpleQueue[Any]) -> None:
    while (message := inbox.get()) is not None:
        if isinstance(message, BatchPlan):
            step = worker.launch(message)
        else:
            worker.sample(step, message)
