"""Requests of the page and how long they take, without a browser. With one: tests/page."""
