"""The launcher: starts, watches and replaces the processes of a ring."""
