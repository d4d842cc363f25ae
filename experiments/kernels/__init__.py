"""`kvjax kernels`: compile every Pallas kernel for accelerators that are not here."""
