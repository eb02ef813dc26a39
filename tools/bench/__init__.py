"""Benchmarks that developers run: `python -m tools.bench.NAME` from the root of a checkout, or `make bench…`."""
