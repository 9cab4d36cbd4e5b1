"""Set-up of the unit tests: makes helper modules importable, and configures hypothesis."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# No test fails because a machine is busy: no deadline per example, and no limit on rejected examples. Each run uses
# other examples; a few are enough, as tests run often.
settings.register_profile(
    "busy", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("busy")
