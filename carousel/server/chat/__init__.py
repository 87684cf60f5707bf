"""Chat: the tools of a request, and what an answer is made of: text, reasoning, calls of tools."""
