"""Runs the campaign, after it has made the tests' shared modules importable as pytest does."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# A process that is forked to become a server would run handlers of gRPC, in which it may hang.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from campaign.command import main

sys.exit(main())
