"""Launches as a user starts them, one or a few for each file. Take `demo_launch` where its settings do."""
