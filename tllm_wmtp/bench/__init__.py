"""Benchmarks; each number travels with its floor."""
