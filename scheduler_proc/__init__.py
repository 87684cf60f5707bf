"""The scheduler process: decides what the model computes next.

It works on token ids, page numbers and lengths, never on tensors, and must not import torch.
"""
