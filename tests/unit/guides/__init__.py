"""Schemas and masks without a grammar library; what libraries make of a guide is in tests/cpu/guides. A
keyword of JSON Schema gets a case that is kept and one that is refused.
"""
