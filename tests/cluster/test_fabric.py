"""One vendor on several hosts: islands by fabric, and calls between hosts without a common fabric; on fake GPUs."""

import pytest
from settings import LATE_KERNELS

#: Fake GPUs have no collective library for several ranks on a host: by default vendors then stay one island.
HOST = {"UCCH_FABRIC": "host"}


NONE = "no active port of InfiniBand, RoCE or EFA"
FOUR = ("nvidia:4", 2, 2)


@pytest.mark.parametrize(("where", "env", "told", "across"), [
    (FOUR, HOST, "nvidia[0-1]@0 nvidia[2-3]@1 fabric: nvidia: each host by itself (UCCH_FABRIC=host) queued", 2),
    (
        ("nvidia:4", 4, 1), {},
        f"nvidia[0]@0 nvidia[1]@1 nvidia[2]@2 nvidia[3]@3 fabric: nvidia: each host by itself ({NONE}) queued", 2,
    ),
    (FOUR, {"UCCH_FABRIC": "all"}, "nvidia[0-3]@0-1 fabric: nvidia: all hosts (UCCH_FABRIC=all) else", 1),
    (
        FOUR, LATE_KERNELS,
        "nvidia[0-3]@0-1 fabric: nvidia: all hosts, as streams cannot do calls between them (ranks 0, 1, 2, 3: load "
        "kernels at their first launch, docs/launch.md has the setting) else", 1,
    ),
    (
        ("nvidia:2,amd:2", 2, 2), {"UCCH_WIRES": "0"}, "nvidia[0-1]@0 amd[2-3]@1 else", 1,
    ),
    (
        ("nvidia:1,amd:1,nvidia:1,amd:1", 2, 2), {},
        f"nvidia[0]@0 amd[1]@0 nvidia[2]@1 amd[3]@1 fabric: nvidia: each host by itself ({NONE}); "
        f"amd: each host by itself ({NONE}) queued", 2,
    ),
], ids=["host", "four hosts", "all", "late", "a vendor a host", "mixed"])  # fmt: skip
def test_islands_are_said(on_crew, where, env, told, across):
    """Sub-communicators have the job's islands, and no team of a vendor's library spans hosts without a common
    fabric."""
    out = on_crew("fabric_cases:structure", *where, **env).output
    lines = [line for line in out.splitlines() if line.startswith("all ")]
    assert len(lines) == 4 and all(line.startswith(f"all {told} ") for line in lines), out
    assert len([line for line in out.splitlines() if line.startswith("inside ")]) == 4, out
    mixed = "amd" in where[0]
    islands = {len(line.partition(" fabric")[0].split()) - 1 for line in out.splitlines() if line.startswith("across ")}
    assert mixed or islands == {across}, out
