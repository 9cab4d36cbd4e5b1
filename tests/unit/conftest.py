"""Lets the unit tests import the helper modules beside them, whatever the import mode; how hypothesis is used."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# A busy machine fails no test: nothing here is about how long an example takes, or how many were drawn in vain.
settings.register_profile(
    "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("busy")
