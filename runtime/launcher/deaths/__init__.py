"""Deaths of processes: whether a request can have caused one, which one did, and whether the process is
started again.
"""
