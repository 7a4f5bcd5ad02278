"""Names of the arrays that the search and its kernels work on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Wholes = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
