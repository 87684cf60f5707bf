"""Helpers that tests share: no tests in here. README.md of tests/ describes each folder; a helper of one file
stays in it.
"""
