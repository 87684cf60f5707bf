"""Layout: position of a process among pipeline stages, each of which has some of the layers, and ranks, each
of which has part of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Position of a process among `num_stages` pipeline stages of `tp_size` ranks each."""

    stage: int = 0
    tp_rank: int = 0
    num_stages: int = 1
    tp_size: int = 1

    @staticmethod
    def of_rank(rank: int, num_stages: int, tp_size: int) -> Layout:
        """Return the position of a rank. Ranks are numbered stage by stage."""
        return Layout(*divmod(rank, tp_size), num_stages, tp_size)

    @property
    def rank(self) -> int:
        """Number of the process among the ranks of all stages."""
        return self.stage * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.tp_size

    @property
    def ranks_of_stage(self) -> range:
        """Numbers of the ranks of the same stage, which have parts of the same layers."""
        return range(self.stage * self.tp_size, (self.stage + 1) * self.tp_size)

    @property
    def is_first(self) -> bool:
        """True if the stage reads token ids."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if the stage has the head."""
        return self.stage == self.num_stages - 1

    @property
    def answers(self) -> bool:
        """True for the process that samples and answers the scheduler."""
        return self.is_last and self.tp_rank == 0

    @property
    def next_rank(self) -> int:
        """Rank of the next stage with the same part of each layer. The stage after the last one is
        the first.
        """
        return (self.stage + 1) % self.num_stages * self.tp_size + self.tp_rank

    @property
    def rank_before(self) -> int:
        """Rank whose next_rank is this one."""
        return (self.stage - 1) % self.num_stages * self.tp_size + self.tp_rank
