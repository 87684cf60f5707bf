"""Tests without torch, transformers, servers or sleeping: seconds for thousands. A new one goes into
the folder of its package.
"""
