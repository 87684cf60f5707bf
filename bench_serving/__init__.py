"""The load generator `python -m bench_serving`: a client like any other, which knows no model and needs no
torch.
"""
