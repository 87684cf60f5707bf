"""The SDK without sockets: session, states, checks of arguments."""
