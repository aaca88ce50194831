"""The zygote: a small process that has the CPU engines imported and forks workers from itself.

Started by exec before the server imports grpc, it has one thread and none of the server's state, so forking it is safe
and takes milliseconds where importing an engine takes seconds. Workers that must not be forked it starts by exec.

It answers Spawn and TakeOver, each with Spawned or SpawnFailed, in their order, and reports Exited for every worker;
one message a datagram. With Spawned come the descriptors of the server's ends of the worker's reception and of its
output pipe.

It outlives the server, and holds what the next one needs to have the workers that served: of each the server's end of
the reception, over which that hands it the sockets of another session, and the pipe that it writes to. It ends with the
supervisor, which holds its connection, or when a server has started another zygote.
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
    # A BLAS thread pool would be lost in the fork, with the locks that its threads hold.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def main(arguments: Sequence[str]) -> int:
    """Serve until the server is gone: the server's socket, its pipe, the modules to import ahead."""
    connection, parent_pipe, *preload = arguments
    # They may go to the whole process group; the server says when it is over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept = exit_with_parent(int(parent_pipe))
    own_environment = dict(os.environ)
    os.environ.update(_ONE_THREAD)
    gc.disable()  # As in bootstrap.py.
    # Only now, for it brings numpy, which counts its threads when it is imported.
    from rocserve.workers.spawner import Spawner

    for name in preload:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # A backend whose engine is not installed says so when a model wants it.
        except Exception as error:
            print(f"the zygote could not import {name} ahead: {error!r}", file=sys.stderr)
    os.environ.clear()
    os.environ.update(own_environment)
    gc.collect()
    gc.freeze()  # Collections in the workers then leave the shared pages as they are.
    gc.enable()
    Spawner(socket.socket(fileno=int(connection)), int(parent_pipe), kept).run()
    return 0
