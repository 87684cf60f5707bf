"""Requests from intake to their end: waiting, tenants, guides, deadlines, outputs, pauses."""
