"""TensorRT-LLM's objects: what they stand for and what they refuse."""
