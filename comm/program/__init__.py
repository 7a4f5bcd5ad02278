"""What one partition does on one rank: every step of its option as an action on buffers.

May import: comm.parameter_server.
"""
