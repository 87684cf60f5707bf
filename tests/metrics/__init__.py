"""Metrics as a real Prometheus reads them; started by `make test-metrics` alone, which installs it."""
