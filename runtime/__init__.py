"""Code that all processes share: messages, settings, transport, and the launcher.

Most modules import only the standard library, msgspec, pyzmq and numpy. Other libraries are imported where
they are needed: tokenizers, transformers and jinja2 for texts, yaml for options files, huggingface_hub for
downloads.
"""
