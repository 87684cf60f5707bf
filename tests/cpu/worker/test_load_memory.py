"""A rank that loads its part of a sharded checkpoint needs little memory beyond it, whatever its dtype."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_load import run

MOST_OF_WEIGHTS = 1.2


@pytest.mark.full  # 1 to 2 GiB are written and read again
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_loading_peaks_at_a_fifth_beyond_the_ranks_weights(dtype: torch.dtype) -> None:
    """Resident memory of a fresh process, mapped files included, as the kernel counts it."""
    ranks = run(1.0, 2, dtype)
    assert len(ranks) == 2
    for measured in ranks:
        assert 450 < measured["weights_mib"] < 600
        assert measured["weights_mib"] < measured["peak_mib"] <= MOST_OF_WEIGHTS * measured["weights_mib"]
