"""ops: what a step does with rows of logits, by a device's kernels; chosen where a Sampler is made."""
