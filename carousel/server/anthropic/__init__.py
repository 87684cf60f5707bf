"""Anthropic's Messages API: its bodies, what becomes of them as a chat request, and its answers."""
