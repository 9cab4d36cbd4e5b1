"""Collectives on trees of several levels: groups of islands, islands that a level cuts through, ragged branches."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: Each rank stands where its place in a list says, then runs random cases.
PLACED = f"""
import os, runpy, sys
rank = next(int(os.environ[n]) for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK") if n in os.environ)
os.environ["UCCH_GROUP"] = sys.argv.pop(1).split(",")[rank]
sys.path.insert(0, {str(Path(__file__).parent)!r})
runpy.run_path({str(Path(__file__).with_name("collective_cases.py"))!r}, run_name="__main__")
"""
LONG = "allreduce,bcast,reduce,allgather,allgatherv,reduce_scatter,reduce_scatter_block:@{}:fragments=3"


@pytest.mark.parametrize(
    ("vendors", "places", "tune"),
    [
        ("nvidia:4,host:2", "x,x,y,y,y,z/1", ""),
        ("nvidia:1,amd:1,host:1,nvidia:1,amd:1,host:1", "a/1,a/2,a/1,b,a/2,b", LONG.format("split_rail")),
    ],
)
def test_cases_on_levels(mpirun: Callable[..., Any], vendors: str, places: str, tune: str) -> None:
    number = secrets.randbelow(1 << 30)
    env = {"UCCH_EMULATE": vendors, "UCCH_TIMEOUT": "100", "UCCH_TUNE": tune}
    job = mpirun(PLACED, 6, args=[places, str(number), "25"], env=env, timeout=170)
    assert f"calls right on 6 ranks (seed {number})" in job.stdout
