"""Collections of garbage are rare here."""

from tests.harness.rare_collections import rare_collections

__all__ = ["rare_collections"]
