"""Linear layers: the library's products compared with the rate of a copy, by number of tokens; and float8
compared with the model's dtype, including products that the library refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.kernels.kernel_rates import BEYOND_CACHES, MAX_LAYERS, Setting
from benchmarks.gpu.timing import recorded_ms
from model_worker.kernels.fp8_linear import REFUSALS, Fp8Linear
from model_worker.kernels.fp8_rows import FP8
from model_worker.kernels.triton.fp8_rows import quantize_rows_fp8, scale_product

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Widths (outputs, inputs) of q, k and v; o; gate and up; down."""


def product_rates(
    rows: Sequence[int], shape: tuple[int, int], setting: Setting, copied: float
) -> Iterator[dict[str, Any]]:
    """Yield the time of one layer for each number of tokens, and the bytes per second that it must read and
    write. copied: bytes per second of a copy.
    """
    layers = cycle([setting.normal(*shape) for _ in range(_num_layers(shape))])
    for num_tokens in rows:
        x = setting.normal(num_tokens, shape[1])
        ms = recorded_ms(partial(_multiply, x, layers), setting.device, setting.repeats)
        num_bytes = x.itemsize * (shape[0] * shape[1] + num_tokens * sum(shape))
        bytes_per_s = num_bytes / (ms * 1e-3)
        yield {
            "rows": num_tokens,
            "us": 1e3 * ms,
            "bytes_per_s": bytes_per_s,
            "of_copy_rate": bytes_per_s / copied,
            "operations_per_s": 2 * num_tokens * shape[0] * shape[1] / (ms * 1e-3),
        }


def _multiply(x: Tensor, layers: Iterator[Tensor]) -> Tensor:
    return F.linear(x, next(layers))


def _num_layers(shape: tuple[int, int]) -> int:
    """Return how many weights to use in turn, as a model does, so that the next is not in the cache."""
    return min(MAX_LAYERS, 1 + BEYOND_CACHES // (shape[0] * shape[1]))


def linear_rate(rows: int, shape: tuple[int, int], setting: Setting) -> dict[str, Any]:
    """Return times of one layer on `rows` tokens: without float8; with it; with it and scaled afterwards; and
    of the library's product alone, which may sum in fewer bits. None: the library refuses that product.
    """
    x, scale = setting.normal(rows, shape[1]), torch.full((shape[0], 1), 0.01, device=setting.at)
    wide = [setting.normal(*shape) for _ in range(_num_layers(shape))]
    narrow = [weight.to(FP8) for weight in wide]
    as_taken, afterwards = (Fp8Linear(quantize_rows_fp8, scale_product) for _ in range(2))
    afterwards.note_refusal(RuntimeError(REFUSALS[0]), rows, narrow[0].shape)
    quantized, x_scale = quantize_rows_fp8(x)

    def product(weight: Tensor, *, fast: bool) -> Tensor:
        return torch._scaled_mm(
            quantized,
            weight.t(),
            scale_a=x_scale,
            scale_b=scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    def ms(weights: list[Tensor], compute: Callable[[Tensor], Tensor]) -> float | None:
        layers = cycle(weights)
        try:
            return recorded_ms(lambda: compute(next(layers)), setting.device, setting.repeats)
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in REFUSALS):
                raise
            return None

    return {
        "rows": rows,
        "shape": shape,
        "ms": {
            "wide": ms(wide, lambda weight: F.linear(x, weight)),
            "float8": ms(narrow, lambda weight: as_taken(x, weight, scale, None)),
            "float8, scaled afterwards": ms(narrow, lambda weight: afterwards(x, weight, scale, None)),
            "product": ms(narrow, lambda weight: product(weight, fast=False)),
            "product, fast sums": ms(narrow, lambda weight: product(weight, fast=True)),
        },
    }
