"""LoRA adapters and prompt tables: read from files beside the forward, and installed into the layers that use
them.
"""
