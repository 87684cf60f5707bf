"""The client library: Client, AsyncClient and LLM. It talks to a ring over ZMQ, and needs no torch."""
