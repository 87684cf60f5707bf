"""Choice of a model's QuantMethod, by setting, checkpoint and device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from model_worker.device.cuda import FP8_NEEDS, has_fp8
from model_worker.quant.base import QuantMethod
from model_worker.quant.fp8 import Fp8
from model_worker.quant.int8 import Int8
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.checkpoint.quantization import CheckpointQuantization

logger = logging.getLogger(__name__)

# Methods for checkpoints' quantised weights, used as they are: (dtype of the weights, device) -> method.
AS_STORED: dict[tuple[str, str], Callable[[], QuantMethod]] = {
    ("int8", "cpu"): partial(Int8, stored=True),
    ("float8_e4m3fn", "cuda"): Fp8,
}
# Methods that --quantization applies to other weights when they are loaded.
AT_LOAD: dict[str, QuantMethod] = {"int8": Int8(stored=False)}


def select_quant_method(
    requested: str, checkpoint: CheckpointQuantization | None, device: str
) -> QuantMethod:
    """Return the QuantMethod. requested: value of --quantization. Weights that the method does not load
    unchanged are dequantised by the loader.
    """
    method = UNQUANTIZED if requested == "auto" else AT_LOAD[requested]
    if checkpoint is None:
        return method
    if requested not in ("auto", checkpoint.dtype):
        reason = f"{requested} was asked for"
    elif checkpoint.block:
        reason = "nothing computes with a scale for each block"
    elif (as_stored := AS_STORED.get((checkpoint.dtype, device))) is None:
        reason = f"on this device ({device}) nothing computes with them"
    elif checkpoint.dtype == "float8_e4m3fn" and not has_fp8():
        reason = f"to compute with them takes {FP8_NEEDS}"
    else:
        return as_stored()
    logger.info(
        "the checkpoint's %s weights are dequantised as they are loaded: %s", checkpoint.dtype, reason
    )
    return method
