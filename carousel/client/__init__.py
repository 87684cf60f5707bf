"""The client library over ZMQ: Client, AsyncClient and LLM. Knows the wire; knows no model, no torch."""
