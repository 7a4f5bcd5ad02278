"""A running job: settings, the session behind the hook, profiling, deciding, checkpoints.

May import: show, comm.execute, compressors.cuda, flight.
"""
