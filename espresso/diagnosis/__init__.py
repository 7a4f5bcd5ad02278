"""What is slow in a recorded run, and what would help: findings, each with the gain that the timeline predicts.

May import: model, flight.
"""
