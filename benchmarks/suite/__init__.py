"""Evidence on models: structurally different tasks, trained plainly and compressed. ``python -m benchmarks.suite``.

:mod:`~benchmarks.suite.tasks` has the tasks and the rules by which their data are made, :mod:`~benchmarks.suite.worker`
trains them on every rank, ``__main__`` starts the ranks, judges and prints.
"""
