"""Replacement of the weights of a model that is being served."""
