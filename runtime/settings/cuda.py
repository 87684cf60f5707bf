"""What only a GPU has."""

from __future__ import annotations

from typing import Annotated, Literal

from runtime.settings.model import ModelSettings
from runtime.settings.setting import setting


class CudaSettings(ModelSettings, frozen=True, forbid_unknown_fields=True):
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3"],
        setting(
            "of keys and values; auto: the model's; fp8_e4m3: half the memory, less exact (docs/cuda.md)"
        ),
    ] = "auto"
    cuda_graph_bs: Annotated[
        str,
        setting(
            "batch sizes whose decode step is recorded as a CUDA graph, like 1,2,4,8; default: 1, 2, 4 and "
            "every eighth up to cuda_graph_max_bs; docs/cuda.md",
            "--cudagraph-capture-sizes",
        ),
    ] = ""
    cuda_graph_max_bs: Annotated[
        int,
        setting(
            "largest batch whose decode step is recorded; 0: as many as may run, but no more than 256",
            "--max-cudagraph-capture-size",
            ge=0,
            le=4096,
        ),
    ] = 0
    disable_cuda_graph: Annotated[
        bool, setting("launch every kernel of a decode step by itself", "--enforce-eager")
    ] = False
