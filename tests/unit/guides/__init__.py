"""Schemas, tags, matchers and masks. A keyword of JSON Schema gets a case that is kept and one that is
refused.
"""
