"""The load generator: python -m bench_serving. A client like any other; knows no model and needs no torch."""
