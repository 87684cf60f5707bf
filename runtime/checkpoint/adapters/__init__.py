"""Reading of adapter directories: LoRA adapters and prompt tables."""
