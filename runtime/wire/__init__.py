"""Messages and plans, their format on sockets and shared pages, and their transport."""
