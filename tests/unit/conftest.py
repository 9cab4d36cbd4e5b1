"""Set-up of the unit tests: helper modules beside them, and how hypothesis is used."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# A busy machine fails no test: nothing here is about how long an example takes, or how many were drawn in vain. Each
# run draws other examples; few are enough for tests that run often.
settings.register_profile(
    "busy", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("busy")
