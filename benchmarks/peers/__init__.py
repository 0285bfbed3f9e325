"""Polyclinic against other frameworks: one file for the work they all do, one for each of them, one that measures."""
