"""Kinds of servers, by the names of --backend."""
