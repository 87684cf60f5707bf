"""Tests that need torch or real processes, and no GPU. A new one goes into the folder of its subject."""
