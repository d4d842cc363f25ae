"""Kernels for key-value caches: arrays in, arrays out; one folder an op. No cache class here."""
