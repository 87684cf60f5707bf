"""TensorRT-LLM's names over the client library: GenerationExecutor, BatchManager and their classes."""
