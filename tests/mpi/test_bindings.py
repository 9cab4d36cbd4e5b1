"""The thin bindings by themselves: ucc_hetero.ucc and ucc_hetero.ucx, without our planner."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bindings.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("case", ["calls", "number_of_teams", "messages"])
def test_thin_binding(crew: Callable[..., Any], case: str) -> None:
    crew(f"bindings_cases:{case}", 3, timeout=90)


@pytest.mark.parametrize("code", EXAMPLES, ids=["ucc", "ucx"])
def test_example(crew: Callable[..., Any], code: str) -> None:
    crew(code, 3, timeout=90)
