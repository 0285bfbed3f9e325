"""Questions to a finished run: predictions, export, explanations, features, attacks."""
