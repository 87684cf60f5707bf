"""Responses: OpenAI's newer API of conversations, translated to and from that of chat completions."""
