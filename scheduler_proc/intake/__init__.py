"""Intake: receives requests, aborts and control requests, and refuses what exceeds limits."""
