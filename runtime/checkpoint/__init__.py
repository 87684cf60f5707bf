"""Checkpoints: configs, quantization and pooling as their files say them, and the Hub."""
