"""Waiting requests, their order and time limits, and the accounts of tenants."""
