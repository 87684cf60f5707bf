"""TensorRT-LLM's names over the client library: GenerationExecutor, BatchManager and what belongs to them."""
