"""What is read in a checkpoint's files, and what is refused. A field of config.json gets a case."""
