"""Bodies of requests, whatever the route: how they are decoded, and what is read of them."""
