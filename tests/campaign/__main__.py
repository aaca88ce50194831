"""Makes what tests share importable, as pytest does, and runs the campaign."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from campaign.command import main

sys.exit(main())
