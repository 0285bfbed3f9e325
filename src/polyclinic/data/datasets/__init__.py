"""The user's images, and public datasets: one folder each with README.md and `dataset.py`, which defines `DATASET`."""
