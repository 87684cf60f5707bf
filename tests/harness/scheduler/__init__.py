"""Parts of a scheduler, put together for tests, and a pipeline in virtual time."""
