"""Kinds of servers, by the names that --backend takes."""
