"""Kinds of operations in a table."""

IDLE, FORWARD, BACKWARD, WEIGHT = 0, 1, 2, 3
"""BACKWARD is the whole backward, or the input's gradient alone where a WEIGHT follows."""
LETTERS = ".FBW"
