"""Mistakes that are planted in the product's sources: a table for each subject, and the program that runs
them.
"""
