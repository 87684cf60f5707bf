"""Execution of plans on the device: batches, forwards, recorded steps."""
