"""The detokenizer process: turns token ids into text and answers the clients."""
