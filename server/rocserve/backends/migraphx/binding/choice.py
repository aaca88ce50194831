"""Which way to MIGraphX is taken."""

from __future__ import annotations

from rocserve.backends.migraphx.binding.c_api import CBinding
from rocserve.backends.migraphx.binding.interface import Binding, MigraphxError
from rocserve.backends.migraphx.binding.module import ModuleBinding
from rocserve.backends.migraphx.installation import MigraphxInstallation

WAYS = ("auto", "c_api", "module")


def open_binding(installation: MigraphxInstallation, wanted: str = "auto") -> Binding:
    """Loads MIGraphX into this process, which `python_command` started. `auto` is the C API where its library is
    installed (it releases the GIL and goes with any Python), else the official module, and nothing else is tried when
    that cannot be loaded. Raises: MigraphxError: it cannot be loaded, or is not installed."""
    if wanted not in WAYS:
        raise MigraphxError(f"there is no binding {wanted!r}: it is one of {', '.join(WAYS)}")
    if wanted == "c_api" and not installation.library:
        raise MigraphxError(
            "binding c_api is wanted, but MIGraphX's C library (libmigraphx_c.so.3) was not found; leave"
            " 'binding' out to have the way that there is"
        )
    if wanted == "module" and not installation.module_folder:
        raise MigraphxError(
            "binding module is wanted, but no Python module migraphx that fits this Python was found; leave"
            " 'binding' out to have the way that there is"
        )
    if wanted == "c_api" or (wanted == "auto" and installation.library):
        return CBinding(installation.library)
    return ModuleBinding(installation.module_folder)
