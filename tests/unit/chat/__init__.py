"""Parsers of tool calls and reasoning. A family gets recorded answers and a row in
test_answer_parsers.py.
"""
