"""InprocExecutor: the worker in the scheduler's own process. It serves CUDA, whose streams run
asynchronously.

On a CPU a threaded stream gives the same overlap, but a forward is slow beside a busy interpreter. So serving
on a CPU uses the process executor; tests use this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from model_worker.device import make_device
from model_worker.executors.adapter_loads import AdapterLoads
from model_worker.executors.ranks import Ranks
from model_worker.load_worker import load_worker
from model_worker.membership import join_ranks
from model_worker.rank_methods import RankMethods, RankView, load_methods
from model_worker.worker import ModelWorker, WorkerStep
from runtime.base.errors import ExecutorError
from runtime.ring.process import ProcessContext
from runtime.wire.plan import AdapterAnswer, AdapterRef, BatchPlan, CallRank, RankAnswer, SampleMasks

ROOM_POLL_MS = 10


class InprocExecutor:
    feeds_back = True

    def __init__(
        self,
        worker: ModelWorker,
        *,
        max_in_flight: int,
        followers: Ranks | None = None,
        methods: RankMethods | None = None,
    ) -> None:
        """followers: the model's other ranks, which are processes of their own. methods: methods that may be
        called between steps; None: only `ping`.
        """
        self.max_in_flight = max_in_flight
        self.limits = worker.limits
        self._worker = worker
        self._followers = followers
        self._loads = AdapterLoads(1)
        self._methods = methods or RankMethods(RankView(0, 1, worker.model, lambda: None))
        self._num_steps = 0
        self._answers: list[RankAnswer] = []
        self._poller = zmq.Poller()
        if followers is not None:
            followers.register(self._poller)

    def launch(self, plan: BatchPlan) -> WorkerStep:
        self._tell(plan)
        self._num_steps = plan.step
        return self._worker.launch(plan)

    def sample(self, handle: WorkerStep, masks: SampleMasks) -> None:
        self._tell(masks)
        self._worker.sample(handle, masks)

    def load_adapter(self, slot: int, ref: AdapterRef) -> None:
        assert self._followers is None, "adapters are refused where a device has ranks beside this one"
        self._worker.load_adapter(self._loads.begin(slot, ref))

    def drop_adapter(self, slot: int) -> None:
        self._loads.forget(slot)
        self._worker.drop_adapter(slot)

    def adapter_answers(self) -> list[AdapterAnswer]:
        for answer in self._worker.adapter_answers():
            self._loads.take(answer)
        return self._loads.answers()

    @property
    def num_ranks(self) -> int:
        return 1

    def call(self, call: CallRank, ranks: Sequence[int]) -> None:
        assert self._followers is None, "calls are refused where a device has ranks beside this one"
        self._answers.append(self._methods.run(call, self._num_steps))

    def rank_answers(self) -> list[RankAnswer]:
        answers, self._answers = self._answers, []
        return answers

    def _tell(self, message: BatchPlan | SampleMasks) -> None:
        if self._followers is not None:
            self._followers.send(message, self._wait)

    def _wait(self) -> None:
        assert self._followers is not None
        name = self._followers.died(dict(self._poller.poll(ROOM_POLL_MS)))
        if name is not None:
            raise ExecutorError(f"{name} has died")

    def close(self) -> None:
        if self._followers is not None:
            self._followers.close()
        self._worker.close()


def create(context: ProcessContext, on_wait: Callable[[], None]) -> InprocExecutor:
    """Load the model in this process; `on_wait` is called while it loads. Raises ModelError
    or ConfigError.
    """
    config = context.config
    overlap = not config.disable_overlap_schedule
    device = make_device(config.device, threaded=overlap)
    member = join_ranks(context, device, on_wait)
    worker = load_worker(config, device, on_wait, member, context.note_loaded)
    followers = Ranks(context, range(1, config.tp_size)) if config.tp_size > 1 else None
    methods = load_methods(config.worker_extension_cls, RankView(0, config.tp_size, worker.model, on_wait))
    return InprocExecutor(worker, max_in_flight=2 if overlap else 1, followers=followers, methods=methods)
