"""LoRA adapters by Triton's kernels."""
