"""Intake of requests, aborts and controls, and the limits by which they are refused."""
