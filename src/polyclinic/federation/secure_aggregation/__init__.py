"""Secure aggregation: a round whose updates the server can add up but not read, in five exchanges with its sites."""
