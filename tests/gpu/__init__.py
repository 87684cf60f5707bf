"""Tests for a GPU; on a pretended one unless there is a real one (`--pretend`). Mark what needs real
memory `gpu`.
"""
