"""Dependent launches: a kernel's blocks may start before the kernel in front of it in the stream has ended.

Every kernel that is launched so calls `gdc_wait` before it reads or writes anything that another kernel touches, and
`gdc_launch_dependents` as early as it likes. A kernel that did not wait would hide the ones before it from those after.
"""

import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def dependent() -> dict[str, Any]:
    """Arguments of a dependent launch; Triton's interpreter, which runs kernels on the CPU, knows none."""
    return {"PDL": False} if INTERPRETED else {"PDL": True, "launch_pdl": True}
