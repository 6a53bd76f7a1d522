"""Finds every attention of a normalised graph and proves what it computes by evaluating pieces of it."""
