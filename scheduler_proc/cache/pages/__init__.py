"""Bookkeeping of KV cache pages: which are free, and which each row has."""
