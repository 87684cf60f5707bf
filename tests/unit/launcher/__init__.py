"""Command line, flags of other servers, supervisor, nodes: without a model."""
