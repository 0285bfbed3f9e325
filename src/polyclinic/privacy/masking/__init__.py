"""Masks that hide each site's update and cancel in the sum: shares of secrets, keys of a round, fixed point, masks."""
