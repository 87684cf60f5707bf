"""Mistral 7B and its successors; a sliding window, where set, holds for every layer."""

from model_worker.models.spec import ModelSpec

SPEC = ModelSpec()
