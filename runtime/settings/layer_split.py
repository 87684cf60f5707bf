"""Division of a model's layers among pipeline stages: as the settings say, or so that the heaviest stage is
as light as possible. Knows weights of layers; knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import inf

from runtime.base.errors import ConfigError


def split_layers(weights: list[int], num_stages: int, sizes: str = "") -> list[range]:
    """Return the layers of each stage. weights: of each layer. sizes: number of layers of each stage, with
    commas; empty: balance by weight. Raises ConfigError, with the numbers.
    """
    if num_stages > len(weights):
        raise ConfigError(f"pp_size: {num_stages} stages cannot share {len(weights)} layers")
    if sizes:
        counts = _counts(sizes, num_stages, len(weights))
    else:
        counts = _balanced(weights, num_stages)
    return [range(*ends) for ends in pairwise([0, *accumulate(counts)])]


def _counts(sizes: str, num_stages: int, num_layers: int) -> list[int]:
    parts = [part.strip() for part in sizes.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"pp_layers: {sizes!r} are no numbers of layers; one for each stage, as 10,12,10")
    counts = [int(part) for part in parts]
    if len(counts) != num_stages:
        raise ConfigError(f"pp_layers: {len(counts)} numbers for {num_stages} stages; give one for each")
    if sum(counts) != num_layers:
        raise ConfigError(f"pp_layers: {sizes} are {sum(counts)} layers; the model has {num_layers}")
    return counts


def _balanced(weights: list[int], num_stages: int) -> list[int]:
    """Return the number of layers of each stage, so that the heaviest stage is as light as possible, and the
    others as even as that allows.
    """
    sums = [0, *accumulate(weights)]
    heaviest, _ = _best_cut(sums, num_stages, lambda done, part: max(done, part))
    _, counts = _best_cut(sums, num_stages, lambda done, part: done + part**2 if part <= heaviest else inf)
    return counts


def _best_cut(
    sums: list[int], num_stages: int, add: Callable[[float, int], float]
) -> tuple[float, list[int]]:
    """Return the division with the smallest total cost, and that cost. sums: weights of the first n layers.
    add: cost function.
    """
    num_layers = len(sums) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # of the first n layers
    for _ in range(num_stages):
        following: dict[int, tuple[float, list[int]]] = {}
        for start, (done, counts) in best.items():
            for end in range(start + 1, num_layers + 1):
                made = add(done, sums[end] - sums[start]), [*counts, end - start]
                if end not in following or made < following[end]:
                    following[end] = made
        best = following
    return best[num_layers]
