"""Answers that are made from vectors of texts: scores and rankings."""
