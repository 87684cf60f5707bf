"""The settings of a launch, by subject. `runtime.settings.config.RuntimeConfig` is all of them.

A setting is declared once: its type and bounds check it, its description is its help text. A msgspec struct
has at most one base with fields, so the groups stand in a row, each adding to the one before:
model, CUDA, KV cache, scheduling, serving, supervision.
"""
