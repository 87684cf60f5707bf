"""Waiting requests, their order and their limits of time, and the accounts of tenants."""
