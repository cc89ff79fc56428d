"""What tpi compare says of runs on different architectures."""

from dataclasses import replace

import pytest

from tests.unit.compare.ledgers import HEADER
from tp_invariant_recipes.compare.promises import promise
