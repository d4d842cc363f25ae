"""Experiments as Python files: a docstring (command, time, expected result) and `get_config()`."""
