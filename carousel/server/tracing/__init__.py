"""Notes on sampled requests, and who is told of them."""
