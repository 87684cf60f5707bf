"""OpenAI's Responses API over HTTP, by the openai client where it can."""
