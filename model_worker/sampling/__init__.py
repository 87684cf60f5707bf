"""Sampling: from logits to tokens. Knows rows and their parameters; knows no request, page or plan."""
