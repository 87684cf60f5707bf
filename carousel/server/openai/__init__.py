"""The routes of OpenAI's protocol, and vLLM's additions to it."""
