"""Checks that a launch makes before it starts any process. They import neither torch nor transformers."""
