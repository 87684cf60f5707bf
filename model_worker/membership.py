"""Membership: the position of this process among those that compute one model, and its connections
to them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from model_worker.device.base import Device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.distributed.layout import Layout
from model_worker.distributed.node_meeting import NodeMeeting
from model_worker.distributed.selection import join_group
from model_worker.distributed.stage_link import SlotSizes, StageLink
from model_worker.distributed.torch_group import meeting_at
from model_worker.models.decoder import StageOutput
from model_worker.runner.warm_up import PROMPT_TOKENS
from runtime.checkpoint.model_config import ModelConfig, read_model_config
from runtime.ring.nodes import addresses_of
from runtime.ring.process import ProcessContext
from runtime.settings.config import RuntimeConfig

TOKEN_BYTES = 8


class Membership(NamedTuple):
    """Position of a process, and its connections to the others of its launch."""

    layout: Layout
    group: RankGroup
    """Group of the ranks of its stage."""
    world: RankGroup
    """Group of all ranks of all stages."""
    link: StageLink | None = None
    """Link to the neighbouring stages, if there are several."""

    @staticmethod
    def of_one_stage(group: RankGroup) -> Membership:
        """Return the membership of a rank whose group has the whole model."""
        return Membership(Layout(tp_rank=group.rank, tp_size=group.size), group, group)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.world.close()
        self.group.close()


ALONE = Membership.of_one_stage(SOLO)


def join_ranks(context: ProcessContext, device: Device, on_wait: Callable[[], None]) -> Membership:
    """Connect to the other ranks of this process's launch. Raises GroupError."""
    # If the scheduler's process has a rank, it is rank 0.
    rank = context.index if context.role == "worker" else 0
    folder = context.endpoints.ranks_dir(context.epoch)
    folder.mkdir(mode=0o700, exist_ok=True)
    meeting = _meet_nodes(context, rank) if context.config.nnodes > 1 else None
    return join_folder(context.config, rank, folder, device.torch_device, on_wait, meeting)


def join_folder(
    config: RuntimeConfig,
    rank: int,
    folder: Path,
    device: torch.device,
    on_wait: Callable[[], None],
    meeting: NodeMeeting | None = None,
) -> Membership:
    """Connect to the ranks that use the same folder, and through the meeting to those on other machines.
    Raises GroupError.
    """
    layout = Layout.of_rank(rank, config.pp_size, config.tp_size)

    def join(name: str, members: range) -> RankGroup:
        place, size = members.index(rank), len(members)
        if meeting is not None and not all(map(meeting.is_here, members)):
            return meeting.group(name, place, size, device)
        (folder / name).mkdir(mode=0o700, exist_ok=True)
        return join_group(
            folder / name,
            place,
            size,
            device,
            dtype=getattr(torch, config.dtype),
            join_timeout_s=config.start_timeout,
            on_wait=on_wait,
        )

    group = join(f"ranks_of_stage{layout.stage}", layout.ranks_of_stage)
    if layout.num_stages == 1:
        return Membership.of_one_stage(group)
    world = join("all", range(layout.num_ranks))
    link = StageLink(
        folder,
        layout,
        _slot_sizes(config),
        join_timeout_s=config.start_timeout,
        on_wait=on_wait,
        meeting=meeting,
    )
    return Membership(layout, group, world, link)


def _meet_nodes(context: ProcessContext, rank: int) -> NodeMeeting:
    """Meet the ranks of this epoch on other machines, at node 0's address. Raises GroupError."""
    config, addresses = context.config, addresses_of(context.config)
    return NodeMeeting(
        lambda timeout: meeting_at(
            addresses.host,
            addresses.port,
            listener_fd=context.listener_fd if rank == 0 else None,
            name=f"epoch{context.epoch}",
            timeout=timeout,
        ),
        lambda other: config.node_of_rank(other) == config.node_rank,
        address=config.node_addr,
        join_timeout_s=config.start_timeout,
    )


def _slot_sizes(config: RuntimeConfig) -> SlotSizes:
    """Return sizes with room for the largest step, or for that of the warm-up if it is larger."""
    model = read_model_config(
        Path(config.model), config.model_impl, config.context_length, config.model_spec, config.hf_overrides
    )
    assert isinstance(model, ModelConfig), "settings with stages are refused for any other"
    dtype: torch.dtype = getattr(torch, config.dtype)
    width = len(StageOutput._fields) * model.hidden_size
    num_tokens = max(config.chunked_prefill_size, PROMPT_TOKENS)
    return SlotSizes(
        hidden=num_tokens * width * dtype.itemsize,
        tokens=config.max_running_requests * TOKEN_BYTES,
        dtype=dtype,
        width=width,
    )
