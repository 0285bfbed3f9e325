"""A site's side of a run: its settings, its images, its policy, its privacy ledger and its logs."""
