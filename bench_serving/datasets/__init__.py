"""Where prompts come from, by the names that --dataset-name takes."""
