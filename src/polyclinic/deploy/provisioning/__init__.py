"""Keys, certificates and kits for server and sites."""
