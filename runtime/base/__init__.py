"""The floor of the project: errors, the registry of names, logs, the environment."""
