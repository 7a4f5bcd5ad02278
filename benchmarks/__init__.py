"""Benchmarks, the emulated network they run on, the demo: run from the repository root, never installed."""
