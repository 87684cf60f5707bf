"""Steps that are recorded once and then run in one call: programs of C++ kernels, or CUDA graphs."""

from __future__ import annotations

# By the name of an Ops, as import strings, so that nothing is imported until it is chosen. Other Ops compute
# steps operation by operation.
RECORDERS: dict[str, str] = {
    "native": "model_worker.runner.recording.forward_program:record",
    "triton": "model_worker.runner.recording.graph_runner:record",
}
# The same for a pipeline stage.
STAGE_RECORDERS: dict[str, str] = {
    "native": "model_worker.runner.recording.stage_program:record",
}
