"""Messages and plans, their format on sockets and shared pages, the transport."""
