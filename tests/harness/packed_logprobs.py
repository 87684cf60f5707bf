"""Log-probabilities in the packed form of the runtime."""

from __future__ import annotations

from typing import Any

import numpy as np

from carousel.client.core.logprobs import LogprobColumns, PromptLogprobs
from runtime.wire.format import pack_ids


def packed(entries: PromptLogprobs) -> LogprobColumns[Any]:
    """Pack entries that have as many others each; None come first."""
    some = [each for each in entries if each is not None]
    tops = [pair for each in some for pair in each.top]
    return LogprobColumns(
        pack_ids([each.token_id for each in some]),
        np.array([each.logprob for each in some], np.float32).tobytes(),
        pack_ids([token_id for token_id, _ in tops]),
        np.array([value for _, value in tops], np.float32).tobytes(),
        pack_ids([each.rank for each in some if each.rank is not None]),
        num_none=len(entries) - len(some),
    )
