"""Between real hospitals: kits, the server's side, and each site's own desk."""
