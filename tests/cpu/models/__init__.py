"""Model families against transformers, and quantization. A family is a row of
tests/harness/models/model_table.py.
"""
