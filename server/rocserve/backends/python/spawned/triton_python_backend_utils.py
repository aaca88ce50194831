"""What model.py imports as `triton_python_backend_utils` in a process that the model has spawned.

Such a process starts with a fresh interpreter and imports model.py anew, to find the function that it is to run. It has
no requests and is no part of the server: calls to other models raise there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rocserve.backends.python.pb_utils import make_module
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.metrics import MetricBook

# Metrics are sent by the model's own process only.
_MODULE = make_module(Path(), Caller(), MetricBook(lambda changes: None))
del _MODULE.get_model_dir  # Only the model's own process knows it.
sys.modules[__name__] = _MODULE
