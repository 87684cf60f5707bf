"""TritonSampling: sampling by Triton kernels, which find out by row what to edit and how, so the host sends
no list of rows.
"""

from __future__ import annotations

from torch import Tensor

from model_worker.kernels.triton.top_logprobs import top_logprobs
from model_worker.sampling.logprobs import Logprobs
from model_worker.sampling.masks import StepMasks
from model_worker.sampling.ops.base import DrawKind
from model_worker.sampling.ops.torch_ops import TorchSampling, top_p_of
from model_worker.sampling.row_table import RowTable
from model_worker.sampling.step import SamplingStep, StepRows
from model_worker.sampling.triton import logit_edits
from model_worker.sampling.triton.draw import draw
from runtime.sampling import features as bit


class TritonSampling(TorchSampling):
    """Results equal torch's, except for the last bit of an exponential or a logarithm."""

    def draw(self, logits: Tensor, step: SamplingStep) -> Tensor:
        """Return a token [S] int64 for each row; all kinds of rows are in the same few launches."""
        sample_rows, columns = step.sample_rows, self._columns
        if not step.present & bit.NOISE:
            return logits.argmax(dim=1)
        top_p = None
        if step.present & bit.TOP_P_DECAY:
            decaying = step.rows_with(bit.TOP_P_DECAY).rows
            top_p = columns.top_p.clone()
            top_p[decaying] = top_p_of(columns, decaying)
        truncates = bool(step.present & bit.TRUNCATES)
        return draw(
            logits, sample_rows.rows, sample_rows.positions, columns, truncates=truncates, top_p=top_p
        )

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
        """Draw as in SamplingOps.draw_by_row, in two launches or four."""
        truncates = kind is DrawKind.TRUNCATED
        return draw(
            logits, rows, positions, self._columns, truncates=truncates, out=out, last_token=last_token
        )

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int, *, ranks: bool = False) -> Logprobs:
        """Return the log-softmax of logits [m, V] at tokens [m] int64 and at the num_top most likely ids;
        with ranks, also the places of the tokens.
        """
        return Logprobs(*top_logprobs(logits, tokens, min(num_top, logits.shape[1]), ranks=ranks))

    def penalise(self, logits: Tensor, penalised: StepRows, counts: Tensor) -> None:
        """Apply the penalties of these rows. counts [max_rows, V] int32: see Penalties."""
        logit_edits.penalize(logits, penalised.step.sample_rows.rows, counts, self._columns)

    def count(self, counts: Tensor, penalised: StepRows, tokens: Tensor) -> None:
        """Count the tokens [S] int64 of these rows in counts [max_rows, V] int32."""
        logit_edits.count_tokens(counts, penalised.step.sample_rows.rows, tokens, self._columns)

    def add_bias(self, logits: Tensor, biased: StepRows, table: RowTable) -> None:
        """Add biases to the logits of these rows. table: ids, then the bits of float32 values; see
        SamplingOps.
        """
        logit_edits.add_bias(logits, biased.step.sample_rows.rows, table.values)

    def forbid_masked(self, logits: Tensor, masks: StepMasks) -> None:
        """Forbid the ids that a mask does not allow."""
        logit_edits.forbid_masked(logits, *masks)

    def forbid_below(self, logits: Tensor, short: StepRows, table: RowTable) -> None:
        """Forbid the listed ids of those rows whose position is below their minimum length;
        see SamplingOps.
        """
        sample_rows = short.step.sample_rows
        logit_edits.forbid_below(
            logits, sample_rows.rows, sample_rows.positions, table.values, self._columns.min_len
        )
