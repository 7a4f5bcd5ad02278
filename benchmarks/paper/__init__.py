"""The two papers' tables and figures, simulated, beside what was published.

Espresso: Wang, Lin, Zhu, Ng, "Hi-Speed DNN Training with Espresso", EuroSys '23. BytePS-Compress: Zhong, Xie, Zheng,
Lin, arXiv 2105.07829. ``python -m benchmarks.paper`` makes all of it; ``docs/fidelity.md`` shows it.

:mod:`~benchmarks.paper.published` is what the papers say, :mod:`~benchmarks.paper.causes` the named reasons why ours
may differ, each a switch, :mod:`~benchmarks.paper.systems` every system's time on a job under a set of switches,
:mod:`~benchmarks.paper.figures` the rows.
"""
