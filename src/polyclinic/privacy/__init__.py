"""What a run costs in privacy, planned, accounted, audited."""
