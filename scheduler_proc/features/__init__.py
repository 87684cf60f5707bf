"""Capabilities of single requests. Each is an object on the
request with a few hooks; the step loop names none of them.
"""
