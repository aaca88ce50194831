"""The zygote: a small process that has imported the CPU engines and forks workers from itself.

It is started by exec before the server imports grpc, has one thread and none of the server's state. So forking it is
safe, and takes milliseconds, while importing an engine takes seconds. Workers that must not be forked are started by
exec. The zygote answers Spawn messages in their order, and reports Exited for every worker, one message per datagram.
Spawned comes with descriptors: the server's ends of the worker's reception and output pipe. The zygote ends with the
server.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence

from rocserve.core.exit_with_parent import exit_with_parent

_ONE_THREAD = {
    # The fork would lose the threads of a BLAS pool, and the locks that they hold would stay locked.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def main(arguments: Sequence[str]) -> int:
    """Serve until the connection is closed. Arguments: connection, server's pipe, the modules to import."""
    connection, parent_pipe, *preload = arguments
    # These signals may go to the whole process group, but the zygote ends with its connection.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept = exit_with_parent(int(parent_pipe))
    own_environment = dict(os.environ)
    os.environ.update(_ONE_THREAD)
    gc.disable()  # See bootstrap.py.
    # Imported only now, because it imports numpy, which reads the number of threads then.
    from rocserve.workers.spawner import Spawner

    for name in preload:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # A backend whose engine is not installed reports that when a model needs it.
        except Exception as error:
            print(f"the zygote could not preload {name}: {error!r}", file=sys.stderr)
    os.environ.clear()
    os.environ.update(own_environment)
    gc.collect()
    gc.freeze()  # Collections in the workers then leave the shared pages unchanged.
    gc.enable()
    Spawner(socket.socket(fileno=int(connection)), int(parent_pipe), kept).run()
    return 0
