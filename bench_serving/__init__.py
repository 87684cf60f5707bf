"""Load generator `python -m bench_serving`: an ordinary client, independent of models and torch."""
