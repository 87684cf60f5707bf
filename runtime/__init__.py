"""Floor 0: messages, configuration, transport and process
plumbing. Standard library, msgspec, pyzmq and numpy only.
"""
