"""Provides `triton_python_backend_utils` to model.py in a process that the model has spawned. Such a process starts a
new interpreter and imports model.py again, to find the spawned function. It has no requests and is not part of the
server, so calls of other models raise."""

from __future__ import annotations

import sys
from pathlib import Path

from rocserve.backends.python.pb_utils import make_module
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.metrics import ModelMetrics

# Only the model's own process sends metrics.
_MODULE = make_module(Path(), Caller(), ModelMetrics(lambda changes: None))
del _MODULE.get_model_dir  # Only the model's own process knows the folder.
sys.modules[__name__] = _MODULE
