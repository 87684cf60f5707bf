"""SamplingOps: protocol of the operations for which a sampler has kernels. Sampler and capabilities only know
this protocol.

    torch_ops    torch operations on any device: the reference
    native_ops   C++ on a CPU
    triton_ops   Triton on a GPU
"""

from __future__ import annotations

import enum
from typing import Protocol

from torch import Tensor

from model_worker.kernels.native.sample_calls import DrawCall
from model_worker.sampling.columns import FeatureArray
from model_worker.sampling.logprobs import Logprobs
from model_worker.sampling.masks import StepMasks
from model_worker.sampling.row_table import RowTable
from model_worker.sampling.step import SamplingStep, StepRows


class DrawKind(enum.Enum):
    """Kind of draw for rows that need nothing else, whose logits are not edited."""

    WHOLE = enum.auto()  # greedy rows, and draws from the whole vocabulary
    TRUNCATED = enum.auto()  # some with top-n-sigma, top-k, top-p or min-p


class SamplingOps(Protocol):
    """Operations on logits [S, V] float32 contiguous. Edits are in place."""

    features: FeatureArray
    """Feature bits [max_rows] of each row, on the host, in memory that stays in place."""

    def draw(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """Return a token [S] int64 for each row of logits, which are not changed."""

    def draw_by_row(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        kind: DrawKind,
        *,
        out: Tensor | None = None,
        last_token: Tensor | None = None,
    ) -> Tensor:
        """Draw tokens [n] int64 from logits [n, V] for table rows and positions [n] int64, by operations that
        read the parameters by row: the host decides nothing, so a device can record them. out [n] int64 and
        last_token [max_rows + 1] int64 (by row) also get the tokens.
        """

    def draw_call(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> DrawCall | None:
        """Return the call with which a recorded C++ step draws tokens [S] int64 for table rows and positions
        [S] int64; None if these operations are not C++.
        """

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int, *, ranks: bool = False) -> Logprobs:
        """Return the log-softmax of logits [m, V] at tokens [m] int64 and at the num_top most likely ids;
        with ranks, also the places of the tokens.
        """

    def penalise(self, logits: Tensor, penalised: StepRows, counts: Tensor) -> None:
        """Apply the penalties of these rows. counts [max_rows, V] int32: see Penalties."""

    def count(self, counts: Tensor, penalised: StepRows, tokens: Tensor) -> None:
        """Count the tokens [S] int64 of these rows in counts [max_rows, V] int32."""

    def add_bias(self, logits: Tensor, biased: StepRows, table: RowTable) -> None:
        """Add biases to the logits of these rows. table: ids, then the bits of float32 values. No id occurs
        twice in a row, and all other rows of the table are empty.
        """

    def forbid_masked(self, logits: Tensor, masks: StepMasks) -> None:
        """Forbid the ids that a mask does not allow."""

    def forbid_below(self, logits: Tensor, short: StepRows, table: RowTable) -> None:
        """Forbid the listed ids of those rows whose position is below their minimum length. All other rows of
        the table are empty, or long enough.
        """
