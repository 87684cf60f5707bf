"""Parts of a scheduler put together for a test, and a pipeline in virtual time."""
