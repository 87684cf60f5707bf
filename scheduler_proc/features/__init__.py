"""Features of single requests. Each is an object on the request with a few hooks; the step loop knows none of
them by name.
"""
