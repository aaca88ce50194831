"""The command `rocserve` on a machine that seems to have many CPUs, and whose front ends come and go every second while
clients ask: any load is busy, and any load is quiet."""

from __future__ import annotations

import sys

from rocserve import cli
from rocserve.frontends import demand

if __name__ == "__main__":
    demand.PACE = demand.Pace(
        busy_share=0.001,
        busy_seconds=0.4,
        quiet_share=1000.0,
        quiet_seconds=1.2,
        sample_seconds=0.1,
        renewal_seconds=1.0,
    )
    note = demand.Demand.note
    # Whether several requests are in flight at each sample would be chance.
    demand.Demand.note = lambda self, now, worked_seconds, in_flight: note(self, now, worked_seconds, 2)
    from rocserve.frontends import running

    running.default_front_ends = lambda cpus: 2
    sys.exit(cli.main())
