"""One operation per file, on tensors alone. The torch version defines the result."""
