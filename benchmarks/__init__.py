"""Benchmarks, the emulated network they run on, and the demo: run from the repository root, never installed."""
