"""Sources of prompts, by the names of --dataset-name."""
