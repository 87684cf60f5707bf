"""Guesses: that output and its distribution are what they are without any. New methods add a proposer."""
