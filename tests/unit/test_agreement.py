"""Which differences between ranks are refused, and what the table says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ucc_hetero.bootstrap.agreement import apply_settings, bridge_settings, judge, steering
from ucc_hetero.errors import AgreementError
from ucc_hetero.machine.discover import HostIdentity
from ucc_hetero.machine.facts import Facts

HERE = HostIdentity("one", "boot-1", "ipc:1", "pid:1", 5)
THERE = replace(HERE, hostname="two", boot_id="boot-2")
FACTS = Facts(
    process="p",
    package="0.1.0",
    ucc="1.4.0",
    ucx="1.22.0",
    memory_types=("host",),
    settings=(),
    byteorder="little",
    host=HERE,
    vendor="host",
    device=0,
    address=b"",
    transports=("cma", "self", "sysv", "tcp"),
)


def job(*changes: dict[str, Any]) -> list[Facts]:
    return [replace(FACTS, **change) for change in changes]


@pytest.mark.parametrize(
    "same",
    [
        job({}, {}, {}),
        job({}, {"ucx": "1.22.1"}),
        job({}, {"memory_types": ("host", "cuda")}, {"memory_types": ("host", "rocm")}),
        job({}, {"host": THERE, "transports": ("self", "tcp", "rc_mlx5")}),
        job({"transports": ("self", "cma")}, {"transports": ("self", "sysv")}),
    ],
    ids=["equal", "ucx release", "memory types", "a common network", "one node needs no network"],
)
def test_accepted(same: list[Facts]) -> None:
    judge(same)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (job({}, {}, {"ucc": "1.6.0"}), ["ucc:", "ranks 0, 1  1.4.0", "rank 2      1.6.0", "UCCH_UCC_LIB"]),
        (job({}, {"ucx": "1.18.0"}), ["ucx:", "1.18", "UCCH_UCX_DIR"]),
        (job({}, {"package": "0.2.0"}), ["package:", "0.2.0", "install the same"]),
        (job({}, {"byteorder": "big"}), ["byteorder:", "rank 1"]),
        (job({}, {"settings": (("UCC_TLS", "ucp"),)}), ["UCC_TLS:", "rank 0  (unset)", "rank 1  ucp", "mpirun -x"]),
        (job({}, {"memory_types": ("cuda",)}), ["rank 1 cannot move host memory"]),
        (
            job({"transports": ("self", "rc_mlx5")}, {"host": THERE}),
            ["network transports:", "rank 0  rc_mlx5", "rank 1  tcp", "UCX_TLS"],
        ),
    ],
    ids=["ucc", "ucx", "package", "byte order", "settings", "host memory", "networks"],
)
def test_refused_with_a_table(ranks: list[Facts], words: list[str]) -> None:
    with pytest.raises(AgreementError) as refused:
        judge(ranks)
    for word in words:
        assert word in str(refused.value)


def test_every_difference_is_listed_at_once() -> None:
    with pytest.raises(AgreementError) as refused:
        judge(job({}, {"ucc": "1.6.0", "package": "9", "settings": (("UCC_CLS", "hier"),)}))
    assert all(word in str(refused.value) for word in ("ucc:", "package:", "UCC_CLS:"))


def test_many_ranks_are_not_all_listed() -> None:
    with pytest.raises(AgreementError) as refused:
        judge(job(*({"ucc": "1.6.0"} for _ in range(1000)), {}))
    assert "…" in str(refused.value) and len(str(refused.value)) < 1000


def test_steering_settings_are_those_that_choose_algorithms() -> None:
    environ = {"UCC_TLS": "ucp", "UCC_LOG_LEVEL": "debug", "UCX_TLS": "tcp", "UCX_PROTO_ENABLE": "n", "HOME": "/"}
    assert steering(environ) == (("UCC_TLS", "ucp"), ("UCX_PROTO_ENABLE", "n"))


def test_bridge_settings_win_and_native_ones_give_way_to_the_user() -> None:
    environ = {"UCC_TLS": "ucp", "UCCHB_UCC_TLS": "all"}
    apply_settings("1.4.0", environ)
    assert environ["UCCHB_UCC_TLS"] == "ucp,self", "the bridge is forced"
    assert environ["UCCHN_UCC_TLS"] == "ucp", "the user's setting reaches the native library"
    assert environ["UCC_TLS"] == "ucp", "nobody else's variables are touched"


@pytest.mark.parametrize(
    ("version", "knomial"), [("1.4.0", False), ("1.7.2", False), ("1.8.0", True), ("1.10.0", True)]
)
def test_no_ring_without_a_topology_where_libucc_takes_its_order_from_it(version: str, knomial: bool) -> None:
    settings = bridge_settings(version)
    assert ("allgatherv:0-inf:@knomial" in settings["UCC_TL_UCP_TUNE"]) is knomial
    assert settings["UCC_TL_UCP_USE_TOPO"] == ("y" if knomial else "n")
