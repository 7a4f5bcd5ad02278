"""What people look at: explanations, reports, traces and pictures of strategies, jobs and timelines.

May import: search, diagnosis.
"""
