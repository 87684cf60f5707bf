"""TensorRT-LLM's names over a runtime: executor, batch manager. A class of theirs gets a file."""
