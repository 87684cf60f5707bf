"""The client library: Client, AsyncClient and LLM. Speaks to a ring over ZMQ; needs no torch."""
