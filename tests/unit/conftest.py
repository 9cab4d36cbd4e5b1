"""Set-up of the unit tests: helper modules beside them, how hypothesis is used, a stand-in for torch.cuda."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

# A busy machine fails no test: nothing here is about how long an example takes, or how many were drawn in vain. Each
# run draws other examples; few are enough for tests that run often.
settings.register_profile(
    "busy", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("busy")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for ``torch.cuda`` that notes what is asked of it; for tests that have torch."""
    from torch_notes import Cuda

    from ucc_hetero.torch import streams

    found = Cuda()
    monkeypatch.setattr(streams.torch, "cuda", found)
    monkeypatch.setattr(streams, "module", lambda device: found)  # also of tensors that are the host's
    monkeypatch.setattr(streams, "raw_stream", lambda device: None)  # a torch for CUDA asks the driver
    return found
