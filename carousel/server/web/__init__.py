"""Web page that browsers get at the server's address."""
