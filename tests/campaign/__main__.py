"""Runs the campaign, after it has made the tests' shared modules importable as pytest does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaign.command import main

sys.exit(main())
