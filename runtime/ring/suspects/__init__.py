"""Requests that a process works on, told to the launcher, and those that it must not work on again."""
