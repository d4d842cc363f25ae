"""The command line, ablations, benchmarks and studies."""
