"""Files of a checkpoint: how they are read, and what is refused. A field of config.json gets a case."""
