"""SamplingOps: a step's operations on rows of logits, by a device's kernels; chosen when a Sampler
is made.
"""
