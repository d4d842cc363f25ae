"""What tests of kvjax, and of anything built on it, need: an oracle, tiny models, conformance."""
