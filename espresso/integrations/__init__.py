"""Training frameworks: thin adapters, each imported only by who uses its framework.

May import: live.
"""
