"""Configs of studies, one mechanism each."""
