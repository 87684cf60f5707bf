"""The tokenizer process: checks requests, turns text into token ids, sends them to the scheduler."""
