"""Finding a strategy for a job, with a certificate.

May import: model.
"""
