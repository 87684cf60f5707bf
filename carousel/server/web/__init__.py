"""The page: what a browser gets of the server's address."""
