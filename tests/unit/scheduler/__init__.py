"""The scheduler's parts: requests, waiting, intake, features, statistics."""
