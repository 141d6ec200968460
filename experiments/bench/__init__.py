"""Benchmarks, run by hand: each compares implementations in one process and prints ratios, errors and a floor."""
