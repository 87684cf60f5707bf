"""Which QuantMethod a model's linear layers have: by setting, checkpoint and device."""

from __future__ import annotations

import logging

from model_worker.device.cuda import has_fp8
from model_worker.quant.base import QuantMethod
from model_worker.quant.fp8 import Fp8
from model_worker.quant.int8 import Int8
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.quantization import CheckpointQuantization

logger = logging.getLogger(__name__)

# What a checkpoint's quantised weights are computed with as they are: (their dtype, the device) -> method.
AS_STORED: dict[tuple[str, str], QuantMethod] = {
    ("int8", "cpu"): Int8(stored=True),
    ("float8_e4m3fn", "cuda"): Fp8(),
}
# What --quantization makes of any other weights when they are loaded.
AT_LOAD: dict[str, QuantMethod] = {"int8": Int8(stored=False)}


def select_quant_method(
    requested: str, checkpoint: CheckpointQuantization | None, device: str
) -> QuantMethod:
    """requested: --quantization. What the method does not load as it is, the loader dequantises."""
    as_stored = None
    if checkpoint is not None and not checkpoint.block and (device != "cuda" or has_fp8()):
        as_stored = AS_STORED.get((checkpoint.dtype, device))
    if requested == "auto":
        method = as_stored or UNQUANTIZED
    else:
        is_stored = checkpoint is not None and checkpoint.dtype == requested
        method = (as_stored if is_stored else None) or AT_LOAD[requested]
    if checkpoint is not None and method.stored is None:
        logger.info(
            "the checkpoint's %s weights are dequantised as they are loaded: on this device (%s) nothing "
            "computes with them",
            checkpoint.dtype,
            device,
        )
    return method
