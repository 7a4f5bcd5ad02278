"""The model of time: a job, what it costs, and the timeline that says how long a strategy takes.

May import: cpu_offload.
"""
