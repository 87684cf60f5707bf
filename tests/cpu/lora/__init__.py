"""LoRA adapters on a CPU."""
