"""A plan becomes device work: batches, forwards, recorded steps."""
