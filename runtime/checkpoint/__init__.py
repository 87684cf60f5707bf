"""Reading of checkpoints: config.json, quantization and pooling files, weight file headers, and the Hugging
Face Hub.
"""
