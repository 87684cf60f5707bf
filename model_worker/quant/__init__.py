"""How linear layers keep their weights and multiply with them. Knows no layer and no file."""
