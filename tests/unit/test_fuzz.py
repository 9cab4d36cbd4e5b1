"""Random invalid input for every parser: it is accepted, or refused with the documented error and a message.

``UCCH_FUZZ=N`` makes N inputs of each kind instead of 60.
"""

import json
import os
import random
import socket
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucc_hetero import env
from ucc_hetero.bootstrap import links
from ucc_hetero.launch.cluster import ClusterError, parse
from ucc_hetero.launch.emulated_net import parse_rate
from ucc_hetero.planner.rules import load_table, parse_tune
from ucc_hetero.planner.topology import Topology, emulated_vendors

INPUTS = int(os.environ.get("UCCH_FUZZ", "60"))
MANY = settings(max_examples=INPUTS, deadline=None, suppress_health_check=list(HealthCheck))

TOPOLOGY = Topology.group(["nvidia", "nvidia", "amd"], [0, 0, 1])
WORDS = [
    *"0123456789:,#@-=[]. ", "allreduce", "bcast", "@flat", "@ring", "@split_rail", "inf", "64k", "4G", "host",
    "nvidia", "amd", "fragments=", "[2-16]", "0-64k", "1e999", "nan", "٣", "9" * 30, "data",
]  # fmt: skip
#: A few of each kind of character: a table of all takes hypothesis seconds to build.
LETTERS = string.printable + "\0\x7f\xa0é²½٣ⅷ\u202e\ufeff\U0001f600"
TEXT = st.one_of(st.text(LETTERS, max_size=30), st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
#: A valid table, and values that may replace its parts.
TABLE = {
    "format": 2,
    "topologies": {TOPOLOGY.fingerprint(): {"weights": [1, 1, 2], "rules": ["allreduce:0-4096:@flat:fragments=1"]}},
}  # fmt: skip
CLUSTER = {
    "hosts": [{"name": "node[0-3]", "slots": 4, "vendor": "nvidia"}, {"name": "other", "slots": 2, "vendor": "amd"}],
    "vendors": {"nvidia": {"image": "one"}, "amd": {"image": "two", "env": {"A": "b"}}},
    "interfaces": ["eth0"], "env": {"X": 1}, "name": "x",
}  # fmt: skip
ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.just(10**400), st.just(-(10**30))),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=8,
)


def places(tree, path=()):
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def changed(tree, path, value):
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


def mutated(tree):
    """Return the tree with one or two odd values."""
    one = st.tuples(st.sampled_from(list(places(tree))), ODD)

    def apply(changes):
        found = tree
        for path, value in changes:
            try:
                found = changed(found, path, value)
            except (KeyError, IndexError, TypeError, AttributeError):
                continue  # it was removed with the previous one
        return found

    return st.lists(one, min_size=1, max_size=2).map(apply)


def judge(kind, call, errors):
    try:
        call()
    except errors as error:
        assert str(error), kind


@MANY
@given(st.one_of(mutated(TABLE).map(lambda tree: json.dumps(tree)), TEXT))
def test_table(text):
    judge("tuned table", lambda: load_table(text, TOPOLOGY), ValueError)


def test_too_much():
    """A deep table, and more ranks than allowed."""
    with pytest.raises(ValueError, match="not a table"):
        load_table("[" * 100_000, TOPOLOGY)
    with pytest.raises(ValueError, match="there are 4"):
        emulated_vendors(f"nvidia:{10**18}", 4)


@MANY
@given(st.one_of(mutated(CLUSTER), ODD))
def test_cluster(document):
    judge("cluster file", lambda: parse(document, environ={}), ClusterError)


@MANY
@given(TEXT, st.sampled_from(sorted(env.TABLE)))
def test_small_texts(text, name):
    judge("UCCH_TUNE", lambda: parse_tune(text), ValueError)
    judge("variables", lambda: env.get(name, {f"UCCH_{name}": text}), ValueError)
    judge("emulated vendors", lambda: emulated_vendors(text, 4), ValueError)
    judge("emulated rates", lambda: parse_rate(text), ValueError)


@MANY
@given(st.lists(st.binary(min_size=0, max_size=80), max_size=4))
def test_knocks_at_the_door(parts):
    """A connection without the secret is refused, whatever it sends."""
    ours, far = socket.socketpair()
    each = links.Links.__new__(links.Links)
    each._key = 5
    for part in parts:
        far.sendall(part)
    if random.random() < 0.5:
        far.sendall(b"UCHA" + (2).to_bytes(2, "little") + os.urandom(32) + os.urandom(32))
    far.shutdown(socket.SHUT_WR)
    assert each._authenticate(ours, {1, 2}) == -1
    ours.close()
    far.close()
    links._listener().socket.close()
    links._listeners.clear()
