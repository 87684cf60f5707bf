"""Answers to requests that generate: their sequences run, and what they give is written as it comes."""
