"""Structured output from request to text. A guide that was wrong once becomes a case of its kind here."""
