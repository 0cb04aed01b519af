"""The Inference Wall: a book about serving language models whose numbers come out of runs that a reader can repeat."""

__version__ = "0.1.0"
