"""Batch sizes of decode steps that are recorded as CUDA graphs, from the settings."""

from __future__ import annotations

from runtime.base.errors import ConfigError
from runtime.settings.config import RuntimeConfig

# A recording takes memory and some tenths of a second; a batch larger than this is busy for so long that
# launching its kernels one by one costs nothing.
LARGEST = 256
SMALL = (1, 2, 4)
STRIDE = 8


def graph_sizes(config: RuntimeConfig) -> tuple[int, ...]:
    """Return the sizes in ascending order, none above max_running_requests; () with disable_cuda_graph.
    Raises ConfigError for invalid or contradictory settings.
    """
    if config.disable_cuda_graph:
        for name in ("cuda_graph_bs", "cuda_graph_max_bs"):
            if getattr(config, name):
                raise ConfigError(f"{name}: with disable_cuda_graph nothing is recorded; give only one")
        return ()
    if config.cuda_graph_bs and config.cuda_graph_max_bs:
        raise ConfigError("cuda_graph_max_bs: cuda_graph_bs names every size; give only one of them")
    rows = config.max_running_requests
    if config.cuda_graph_bs:
        return tuple(size for size in _listed(config.cuda_graph_bs) if size <= rows) or (rows,)
    largest = min(config.cuda_graph_max_bs or LARGEST, rows)
    return tuple(
        sorted({size for size in (*SMALL, *range(STRIDE, largest, STRIDE)) if size < largest} | {largest})
    )


def _listed(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"cuda_graph_bs: {text!r} is no list of numbers like 1,2,4,8") from None
    if sizes[0] < 1:
        raise ConfigError(f"cuda_graph_bs: {sizes[0]} is no batch size; the smallest is 1")
    return sizes
