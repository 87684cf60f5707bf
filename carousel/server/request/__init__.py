"""Request bodies of all routes: decoding them, and reading common fields."""
