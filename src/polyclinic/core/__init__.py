"""The vocabulary of the package: types, random streams, options, jobs and errors."""

__version__ = "0.1.0"
