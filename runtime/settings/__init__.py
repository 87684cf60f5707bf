"""Settings of a launch. Each is declared once, in `model_settings`, `engine_settings` or `server_settings`:
its type and bounds check it, and its description is its help text. `config.RuntimeConfig` has all of them.
"""
