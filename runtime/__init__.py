"""Code that all processes share: messages, settings, transport, and the launcher. Imports only the standard
library, msgspec, pyzmq and numpy, except for runtime.text, which also imports tokenizers and transformers.
"""
