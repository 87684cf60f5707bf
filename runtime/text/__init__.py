"""Text and tokens: tokenizers, chat templates, incremental decoding. No torch."""
