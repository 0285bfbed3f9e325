"""Aggregation that one hostile site cannot own: rules for bounding and combining updates, and the screen of a round."""
