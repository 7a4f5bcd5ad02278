"""Compiled code on disk: where kernels are kept between runs, and when they are stale.

May import: nothing of ours.
"""
