"""Chat: the tools of a request, and the parts of an answer: text, reasoning and tool calls."""
