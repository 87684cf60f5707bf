"""Floor 1: the one brain. Decides what the model computes
next; works on ids, page numbers and lengths, never on tensors.
"""
