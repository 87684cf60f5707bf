"""The OpenAI and SGLang endpoints, by the openai client where it can. A field gets a case where its
endpoint is.
"""
