"""The flight recorder's one form: what happened in each step of each rank, as it is kept, written, read, aligned.

Who reads it: the profiler, the watch, diagnosis, traces and pictures. May import: strategies.
"""
