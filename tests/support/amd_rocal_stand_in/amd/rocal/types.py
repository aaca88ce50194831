"""amd.rocal.types."""

from rocal_pybind.types import *  # noqa: F403
