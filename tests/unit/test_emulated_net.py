"""The layout of emulated clusters, which needs neither root nor a network."""

import pytest

from ucc_hetero.launch import emulate, emulated_net, emulated_node


@pytest.mark.parametrize(
    ("text", "bits"),
    [("4gbit", 4 * 10**9), ("800 Mbit/s", 8 * 10**8), ("2.5gbit", 25 * 10**8), ("none", 0)],
)
def test_rate(text: str, bits: int) -> None:
    assert emulated_net.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "4", "4gb", "-1gbit", "1kbit", "0", "nan"])
def test_rate_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"rate '{text}': "):
        emulated_net.parse_rate(text)


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, 2, "1gbit", 1), "hosts=0"),
    ((2, 0, "1gbit", 1), "slots=0"),
    ((2, [1], "1gbit", 1), r"slots=\[1\]"),
    ((2, 1, "1gbit", 9), "links=9"),
    ((2, 1, "1gbit,1gbit,1gbit", 1), "3 rates for 2 hosts"),
    ((2, 1, "1gbit+1gbit", 3), "2 rates for 3 links"),
])  # fmt: skip
def test_layout_that_cannot_be(arguments: tuple[int, int, str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        emulated_net.layout(*arguments)


def test_shapes() -> None:
    """Links are shaped at both ends, and those without a rate at none."""
    hosts = emulated_net.layout(2, 1, "4gbit,none", 1)
    ip, tc = emulated_net.switch_batches(hosts, [10, 20], 1500)
    assert "link add name port1.0 mtu 1500 master br0 up type veth peer name eth0 mtu 1500 netns 20" in ip
    shaped = [*tc.splitlines(), *(line for host in hosts for line in emulated_net.host_batches(host)[1].splitlines())]
    assert [line.split("root ")[0] for line in shaped] == ["qdisc add dev port0.0 ", "qdisc add dev eth0 "]
    assert all("tbf rate 4000000000bit burst 500000" in line for line in shaped)


def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--rate", "fast"], ["--hosts", "0"], ["--slots", "two"]):
        with pytest.raises(SystemExit) as caught:
            emulate.main([*words, "--", "true"])
        assert caught.value.code == 2
    assert "rate 'fast'" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "host", "command"), [
    (["node1", "hostname"], "node1", "hostname"),
    (["-x", "-o", "BatchMode=yes", "-p22", "me@node1", "A=1;", "prted", "--x"], "node1", "A=1; prted --x"),
    (["node1"], "node1", ""),
])  # fmt: skip
def test_ssh_command_line(words: list[str], host: str, command: str) -> None:
    assert emulated_node.parse_ssh(words) == (host, command)
