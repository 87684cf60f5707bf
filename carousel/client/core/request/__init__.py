"""Requests as callers write them, and their conversion to the form on the wire."""
