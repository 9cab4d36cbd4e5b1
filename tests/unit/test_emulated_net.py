"""The layout of emulated clusters, which needs neither root nor a network."""

import pytest

from ucc_hetero.launch import emulate, emulated_net, emulated_node


@pytest.mark.parametrize(
    ("text", "bits"),
    [("4gbit", 4 * 10**9), ("800 Mbit/s", 8 * 10**8), ("2.5gbit", 25 * 10**8), (1e9, 10**9), ("none", 0)],
)
def test_rate(text: str | float, bits: int) -> None:
    assert emulated_net.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "4", "4gb", "-1gbit", "1kbit", 0, "nan"])
def test_rate_that_is_none(text: str | float) -> None:
    with pytest.raises(ValueError, match=f"rate '?{text}'?: "):
        emulated_net.parse_rate(text)


def test_rates_per_host_and_link() -> None:
    giga = 10**9
    assert emulated_net.parse_rates("1gbit", 2, 2) == [(giga, giga), (giga, giga)]
    assert emulated_net.parse_rates("1gbit,2gbit+none", 2, 2) == [(giga, giga), (2 * giga, 0)]
    assert emulated_net.parse_rates([giga, "3gbit"], 2, 1) == [(giga,), (3 * giga,)]
    with pytest.raises(ValueError, match="2 rates for 3 hosts"):
        emulated_net.parse_rates("1gbit,2gbit", 3, 1)
    with pytest.raises(ValueError, match="2 rates for 1 links"):
        emulated_net.parse_rates("1gbit+2gbit", 1, 1)


def test_layout() -> None:
    hosts = emulated_net.layout(3, [2, 2, 1], "4gbit,4gbit,1gbit", 2, "node")
    assert [host.name for host in hosts] == ["node0", "node1", "node2"]
    assert emulated_net.hostfile(hosts) == "node0 slots=2\nnode1 slots=2\nnode2 slots=1\n"
    assert [link.address for link in hosts[2].links] == ["10.10.0.3", "10.11.0.3"]
    assert "10.11.0.2 node1-eth1\n" in emulated_net.hosts_file(hosts)


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 2, "1gbit", 1, "n"), "hosts=0"),
    ((2, 0, "1gbit", 1, "n"), "slots=0"),
    ((2, [1], "1gbit", 1, "n"), r"slots=\[1\]"),
    ((2, 1, "1gbit", 9, "n"), "links=9"),
    ((2, 1, "1gbit", 1, "n/1"), "prefix='n/1'"),
])  # fmt: skip
def test_layout_that_cannot_be(arguments: tuple[int, int, str, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        emulated_net.layout(*arguments)


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert emulate.main(["--hosts", "2", "--rate", "4gbit,none", "--dry-run", "--", "mpirun", "true"]) == 0
    printed = capsys.readouterr().out
    assert "link add name port1.0 mtu 1500 master br0 up type veth peer name eth0 mtu 1500 netns" in printed
    assert printed.count("tbf rate 4000000000bit burst 500000") == 2, "both ends of the first host's link, no others"


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--rate", "fast"], ["--hosts", "0"], ["--slots", "two"]):
        with pytest.raises(SystemExit) as caught:
            emulate.main([*words, "--dry-run"])
        assert caught.value.code == 2
    assert "rate 'fast'" in capsys.readouterr().err


def test_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate.sys, "platform", "linux")
    monkeypatch.setattr(emulate.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert "tc not found: install iproute2" in str(emulate.unavailable.__wrapped__())
    monkeypatch.setattr(emulate.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(emulate.os, "geteuid", lambda: 1000)
    assert "need root" in str(emulate.unavailable.__wrapped__())


@pytest.mark.parametrize(("words", "host", "command"), [
    (["node1", "hostname"], "node1", "hostname"),
    (["-x", "-o", "BatchMode=yes", "-p22", "me@node1", "A=1;", "prted", "--x"], "node1", "A=1; prted --x"),
    (["node1"], "node1", ""),
])  # fmt: skip
def test_ssh_command_line(words: list[str], host: str, command: str) -> None:
    assert emulated_node.parse_ssh(words) == (host, command)
