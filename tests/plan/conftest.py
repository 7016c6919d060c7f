"""Make the examples importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
