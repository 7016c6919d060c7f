"""Modules whose examples are run where what they need is installed, and that dev does without."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("pytensor") else ["veneer/interop/pytensor.py"]
