"""Lets the tests here import the plans beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
