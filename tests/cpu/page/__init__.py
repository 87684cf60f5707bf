"""What the page reads and how long that takes, without a browser. With one: tests/page."""
