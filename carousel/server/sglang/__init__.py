"""SGLang's /generate, and /tokenize and /detokenize."""
