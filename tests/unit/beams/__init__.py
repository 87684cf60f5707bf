"""Parts of a beam search."""
