"""StageLink: the connections of a rank to the pipeline stages before and after it.

    stage k       hidden states of a step   ─►  stage k + 1
    last stage    tokens of a step          ─►  stage 0

A stage that has sent a step continues with the next one. The transport is shared memory within a machine
(`memory_link`) and gloo between machines (`network_link`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model_worker.distributed.group import LATE_S, GroupError
from model_worker.distributed.layout import Layout
from model_worker.distributed.link_end import GivingEnd, TakingEnd, Waiting
from model_worker.distributed.memory_link import MemoryGivingEnd, MemoryTakingEnd, accept, connect, listen
from model_worker.distributed.network_link import GIVER, TAKER, NetworkGivingEnd, NetworkTakingEnd
from model_worker.distributed.node_meeting import NodeMeeting

HIDDEN_SLOTS = 2
"""Number of slots for hidden states: one is used while the next one arrives."""


class SlotSizes(NamedTuple):
    hidden: int
    """Bytes of the largest step's hidden states."""
    tokens: int
    """Bytes of the most tokens that a step samples."""
    dtype: torch.dtype
    """Dtype of the hidden states."""
    width: int
    """Values in a row of hidden states, over all tensors."""


class StageLink:
    """Links of a rank to the stages before and after it. Steps are received in the order in which they were
    sent.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        sizes: SlotSizes,
        *,
        join_timeout_s: float,
        on_wait: Callable[[], None],
        late_s: float = LATE_S,
        meeting: NodeMeeting | None = None,
    ) -> None:
        """Connect to the ranks of the stages before and after: on this machine through the same folder, on
        others through the meeting. on_wait: called about every SLICE_S while another stage is awaited. Raises
        GroupError.
        """
        self.layout = layout
        self._sizes = sizes
        deadline = time.monotonic() + join_timeout_s
        # Up to as many other steps as there are stages may be ahead of a step.
        waiting = Waiting(on_wait, late_s * (layout.num_stages + 1))
        stages = {
            GIVER: (layout.stage + 1) % layout.num_stages,
            TAKER: (layout.stage - 1) % layout.num_stages,
        }
        is_far = {
            GIVER: meeting is not None and not meeting.is_here(layout.next_rank),
            TAKER: meeting is not None and not meeting.is_here(layout.rank_before),
        }
        slots_given = self._slots(layout.is_last)
        with ExitStack() as stack:
            listener = None if is_far[TAKER] else stack.enter_context(listen(folder, layout.rank))
            if not is_far[GIVER]:
                end = connect(folder, layout.next_rank, deadline, on_wait)
                self._next: GivingEnd = MemoryGivingEnd(
                    end, *slots_given, stage=stages[GIVER], waiting=waiting
                )
            # Each link has the number of the rank that sends. All ranks open their links in the order of
            # these numbers, so no two ranks wait for each other.
            for number, role in sorted([(layout.rank, GIVER), (layout.rank_before, TAKER)]):
                if not is_far[role]:
                    continue
                assert meeting is not None
                group = meeting.link(number, role)
                if role == GIVER:
                    self._next = NetworkGivingEnd(group, *slots_given, stage=stages[role], waiting=waiting)
                else:
                    self._before: TakingEnd = NetworkTakingEnd(
                        group, *self._slots(layout.is_first), stage=stages[role], waiting=waiting
                    )
            if listener is not None:
                end = accept(listener, deadline, on_wait)
                self._before = MemoryTakingEnd(end, stage=stages[TAKER], waiting=waiting)

    def _slots(self, are_tokens: bool) -> tuple[int, int]:
        """Return (bytes of a slot, number of slots)."""
        if are_tokens:
            return self._sizes.tokens, self.layout.num_stages + 2
        return self._sizes.hidden, HIDDEN_SLOTS

    def give_hidden(self, step: int, parts: Sequence[Tensor]) -> None:
        """Send a step's tensors [T, hidden_size] to the next stage, one after the other."""
        self._next.send(step, len(parts[0]), parts)

    def take_hidden(self, step: int, num_tokens: int) -> Tensor:
        """Receive a step's tensors [parts, T, hidden_size], in memory that stays valid until `let_go`."""
        num_rows = self._before.receive(step)
        if num_rows != num_tokens:
            raise GroupError(f"the stage before gave {num_rows} tokens of step {step}, not {num_tokens}")
        sizes = self._sizes
        data = self._before.slot()[: num_tokens * sizes.width * sizes.dtype.itemsize]
        return data.view(sizes.dtype)

    def let_go(self) -> None:
        """Release the memory of the step that was received last."""
        self._before.let_go()

    def give_tokens(self, step: int, tokens: Tensor) -> None:
        """Send the step's sampled tokens, [S] int64, to the first stage."""
        self._next.send(step, len(tokens), [tokens])

    def take_tokens(self, step: int) -> Tensor:
        """Receive the step's sampled tokens, [S] int64."""
        num_tokens = self._before.receive(step)
        tokens = self._before.slot()[: num_tokens * 8].view(torch.int64).clone()
        self._before.let_go()
        return tokens

    @property
    def has_tokens(self) -> bool:
        """Return True if tokens have arrived that were not received yet."""
        return self._before.has_come()

    def close(self) -> None:
        self._next.close()
        self._before.close()
