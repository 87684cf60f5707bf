"""Triton's kernels in its interpreter, each against its torch reference. A kernel gets a file of odd
shapes.
"""
