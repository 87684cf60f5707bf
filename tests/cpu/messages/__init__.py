"""Anthropic's Messages API over HTTP, by Anthropic's client where it can. A field gets a case where its
endpoint is.
"""
