"""Benchmarks: each measures one thing against its reference, in the same run."""
