"""The tokenizer's loop: validation, turns of tenants, admission."""
