"""What is noted of sampled requests, and who is told."""
