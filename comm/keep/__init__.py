"""What outlives an iteration: residuals, velocities, factors.

May import: comm.
"""
