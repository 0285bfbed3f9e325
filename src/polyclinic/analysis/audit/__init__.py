"""The audit of a privacy claim: planted canaries, and everything that a run releases against what its plan charges."""
