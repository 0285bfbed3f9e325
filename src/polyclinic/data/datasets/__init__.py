"""Public datasets, one folder each with `dataset.py` (it defines `DATASET`) and README.md; and the user's images."""
