"""The scheduler as a whole, turn by turn, between a fake worker and fake detokenizers: no torch, no process.
`running()` of harness/scheduler/scheduler_parts.py makes one; random traffic is in tests/cpu/scheduler.
"""
