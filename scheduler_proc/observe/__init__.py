"""Statistics, records and logs of the scheduler's steps."""
