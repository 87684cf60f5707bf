"""Core objects of the scheduler: requests, rows, batches, results and output, from a sequence's arrival to
its end.
"""
