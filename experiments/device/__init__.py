"""Parts of `python -m experiments.device_check`: kernels on a GPU, checked and timed."""
