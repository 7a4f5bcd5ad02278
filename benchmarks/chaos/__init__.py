"""Faults at random moments of real jobs: does each job go on as if nothing had been, or end with the right error?

    python -m benchmarks.chaos --faults 200 --seed 7 [--json]

``trial`` plays one fault, ``faults`` knows them, ``worker`` is the script that is disturbed.
"""
