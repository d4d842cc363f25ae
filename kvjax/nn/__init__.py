"""Functional Flax modules of a decoder that threads an explicit cache."""
