"""Batch files: requests from one file, answers to another (`carousel-batch`, docs/batch_files.md)."""
