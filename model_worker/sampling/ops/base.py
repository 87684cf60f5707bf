"""SamplingOps: what a sampler has kernels for. Sampler and capabilities know this protocol, and no device.

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
    """The kind of draw of rows that need nothing else: their logits are not edited."""

    WHOLE = enum.auto()  # greedy rows, and draws from the whole vocabulary
    TRUNCATED = enum.auto()  # some with top-n-sigma, top-k, top-p or min-p


class SamplingOps(Protocol):
    """Logits are [S, V] float32 contiguous. Edits are in place."""

    features: FeatureArray
    """Array [max_rows] on the host: the bits of what each row needs, in the memory that is there for good."""

    def draw(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """A token [S] int64 for each row of logits, which stay as they are."""

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
        """Tokens [n] int64 of logits [n, V] for table rows and positions [n] int64, by operations that read
        the parameters by row: nothing is decided on the host, so a device can record it.

        out [n] int64 and last_token [max_rows + 1] int64, by row, get the tokens.
        """

    def draw_call(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor) -> DrawCall | None:
        """The call with which a recorded step of C++ draws tokens [S] int64 for table rows and positions [S]
        int64; None: these operations are not C++.
        """

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
        """Log-softmax of logits [m, V] at tokens [m] int64 and at the num_top most likely ids."""

    def penalise(self, logits: Tensor, penalised: StepRows, counts: Tensor) -> None:
        """Apply the penalties of some rows; counts [max_rows, V] int32, see Penalties."""

    def count(self, counts: Tensor, penalised: StepRows, tokens: Tensor) -> None:
        """Count the tokens [S] int64 of some rows in counts [max_rows, V] int32."""

    def add_bias(self, logits: Tensor, biased: StepRows, table: RowTable) -> None:
        """Add to the logits of some rows what their table lists: ids, then the bits of float32 values. No id
        comes twice in a row, and rows that are not among them list nothing.
        """

    def forbid_masked(self, logits: Tensor, masks: StepMasks) -> None:
        """Forbid the ids that a mask does not allow."""

    def forbid_below(self, logits: Tensor, short: StepRows, table: RowTable) -> None:
        """Forbid the listed ids of some rows: those whose position is below their minimum length. Rows that
        are not among them list nothing, or are long enough.
        """
