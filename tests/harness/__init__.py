"""Helpers that several tests share, without tests. README.md of tests/ describes each folder. A helper of one
file stays in it.
"""
