"""Connection of a client to a ring: lanes, links, restarts, and how a ring is found."""
