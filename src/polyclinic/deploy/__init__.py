"""Runs between real sites: kits with keys, the server's side, and what each site runs for itself."""
