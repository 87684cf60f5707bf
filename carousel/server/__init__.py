"""The HTTP server: a client of the ring that speaks OpenAI's and SGLang's protocols."""
