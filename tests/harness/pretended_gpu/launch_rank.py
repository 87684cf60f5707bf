"""Worker process of `tests.harness.pretended_gpu.launch`, instead of model_worker.main."""

from __future__ import annotations

from tests.harness.pretended_gpu.launch import run

if __name__ == "__main__":
    run("worker")
