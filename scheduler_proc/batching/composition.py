"""Construction of the parts that decide about batches: the settings that name them, and factories for prefix
cache, schedule policy and BatchBuilder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from runtime.base.errors import ConfigError
from runtime.base.registry import resolve
from scheduler_proc.batching.admission import Admission
from scheduler_proc.batching.batch_builder import BatchBuilder
from scheduler_proc.batching.chosen_batch import ChosenBatch
from scheduler_proc.batching.micro_batches import MicroBatches
from scheduler_proc.batching.phases import BATCHING_TYPES
from scheduler_proc.batching.preemption import Preemption
from scheduler_proc.batching.prefill_adder import StepLimits
from scheduler_proc.cache.base import PrefixCache
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.cache.no_cache import NoCache
from scheduler_proc.cache.radix.eviction import make_eviction_policy
from scheduler_proc.cache.radix.radix_cache import RadixCache
from scheduler_proc.capacity import CAPACITY_POLICIES
from scheduler_proc.capacity.base import CapacityPolicy
from scheduler_proc.capacity.max_utilization import AsChosen, MaxUtilization
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.llm_request import KvCacheView
from scheduler_proc.policy import POLICIES
from scheduler_proc.policy.base import SchedulePolicy
from scheduler_proc.port import Port
from scheduler_proc.request_scheduler import (
    CapacityScheduler,
    EverybodyFits,
    EverybodyTakesPart,
    MicroBatchScheduler,
    RequestScheduler,
    SimpleScheduler,
)
from scheduler_proc.waiting.width_gate import WidthGate


class BatchingSettings(NamedTuple):
    limits: StepLimits
    batching: str = "inflight_fused"
    capacity: str = "max_utilization"
    """The name of a capacity policy, or package.module:Class of a CapacityScheduler of the user's own."""
    conservativeness: float = 1.0
    """Factor on the output lengths that max_utilization estimates. Above 1 it admits later and retracts less.
    """
    micro_batch_scheduler: str = ""
    """Import path (package.module:Class) of a MicroBatchScheduler of the user's own; empty for none."""
    request_scheduler: str = ""
    """Import path (package.module:Class) of a RequestScheduler of the user's own, which replaces both the
    capacity and the micro-batch scheduler; empty for none.
    """
    num_stages: int = 1
    """Number of stages of the pipeline that computes a step."""
    drains_widths: bool = False
    """Run requests of one beam width at a time: a request of another width starts when all before it have
    ended.
    """


def make_prefix_cache(
    page_size: int, port: Port, eviction: str = "lru", *, is_disabled: bool = False
) -> PrefixCache:
    """Make the prefix cache of the settings. `eviction`: a policy's name, or package.module:Class of the
    user's own. Raises ConfigError.
    """
    policy = make_eviction_policy(eviction, port.construct)
    if is_disabled:
        return NoCache(page_size, port.now_s)
    return RadixCache(page_size, port.now_s, policy)


def make_schedule_policy(name: str, port: Port) -> SchedulePolicy:
    """Make a schedule policy. `name`: one of POLICIES, or package.module:Class of the user's own. Raises
    ConfigError.
    """
    policy: SchedulePolicy = _constructed("schedule policy", name, POLICIES, "order", port)
    return policy


def make_batch_builder(
    settings: BatchingSettings, lifecycle: Lifecycle, policy: SchedulePolicy, port: Port
) -> BatchBuilder:
    """Make the BatchBuilder that the settings describe. Raises ConfigError if a name is unknown or two
    settings exclude each other.
    """
    kv = lifecycle.kv
    capacity = _make_capacity_policy(settings, kv)
    if settings.drains_widths:
        lifecycle.room.width_gate = WidthGate(port.now_s)
    admission = Admission(lifecycle, policy, capacity.closes_batches, port.is_ready)
    preemption = chooser = None
    if getattr(policy, "preempts", False):
        if settings.capacity != "max_utilization" or not isinstance(capacity, MaxUtilization):
            raise ConfigError(
                "schedule policy: it preempts, which only max_utilization allows, not"
                f" {settings.request_scheduler or settings.capacity}"
            )
        preemption = Preemption(lifecycle, admission, capacity)
    scheduler = _make_request_scheduler(settings, kv, port)
    if scheduler is not None:
        chooser = ChosenBatch(lifecycle, admission, scheduler, settings.limits.max_requests)
    phases = resolve("batching type", settings.batching, BATCHING_TYPES)(kv.rows)
    micro_batches = MicroBatches(kv.rows, settings.num_stages) if settings.num_stages > 1 else None
    return BatchBuilder(
        lifecycle, admission, capacity, phases, settings.limits, preemption, chooser, micro_batches
    )


def _make_capacity_policy(settings: BatchingSettings, kv: KVCacheManager) -> CapacityPolicy:
    if ":" in settings.capacity or settings.request_scheduler:
        return AsChosen(kv)
    if settings.capacity == "max_utilization":
        return MaxUtilization(kv, settings.conservativeness)
    policy: CapacityPolicy = resolve("capacity scheduler", settings.capacity, CAPACITY_POLICIES)(kv)
    return policy


def _make_request_scheduler(
    settings: BatchingSettings, kv: KVCacheManager, port: Port
) -> RequestScheduler | None:
    """Return the request scheduler of the user's own, or None if the settings name none."""
    of_capacity = (kv.rows.max_rows, KvCacheView(kv))
    of_micro_batch = (settings.limits.max_requests, settings.limits.max_tokens)
    if settings.request_scheduler:
        name, arguments = settings.request_scheduler, (*of_capacity, *of_micro_batch)
        scheduler: RequestScheduler = _constructed(
            "request scheduler", name, {}, "schedule_request", port, *arguments
        )
        return scheduler
    if ":" not in settings.capacity and not settings.micro_batch_scheduler:
        return None
    capacity_scheduler: CapacityScheduler = EverybodyFits()
    micro_batch_scheduler: MicroBatchScheduler = EverybodyTakesPart(*of_micro_batch)
    if ":" in settings.capacity:
        name = settings.capacity
        capacity_scheduler = _constructed(
            "capacity scheduler", name, CAPACITY_POLICIES, "schedule_request", port, *of_capacity
        )
    if settings.micro_batch_scheduler:
        name = settings.micro_batch_scheduler
        micro_batch_scheduler = _constructed(
            "micro-batch scheduler", name, {}, "schedule", port, *of_micro_batch
        )
    return SimpleScheduler(capacity_scheduler, micro_batch_scheduler)


def _constructed(
    kind: str, name: str, table: Mapping[str, str], method: str, port: Port, *arguments: object
) -> Any:
    """Construct the class that the setting names, with these arguments. Raises ConfigError if it is not a
    class or lacks `method`.
    """
    cls = resolve(kind, name, table)
    can_be = callable(cls) and (hasattr(cls, method) or not isinstance(cls, type))
    made = port.construct(cls, *arguments) if can_be else None
    if not callable(getattr(made, method, None)):
        raise ConfigError(
            f"{kind} {name!r}: this is no class with a method {method} (docs/adding_a_policy.md)"
        )
    return made
