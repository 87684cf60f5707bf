"""Parts of guessing, without a scheduler."""
