"""Rows that guess, in a scheduler that runs: tokens and counts are those of rows that do not."""
