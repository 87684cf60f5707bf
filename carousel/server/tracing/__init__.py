"""Time stamps of sampled requests, and the collectors and profiles that get them."""
