"""API keys, and how tenants share the resources of an HTTP process."""
