"""checks: what is known to fail before any process is started. Imports neither torch nor transformers."""
