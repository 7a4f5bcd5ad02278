"""Carrying out a plan: lanes, the executor of host and device, how it fails.

May import: comm.program.
"""
