"""The page in Debian's Chromium, by `make test-page` alone. A view of the page gets a file."""
