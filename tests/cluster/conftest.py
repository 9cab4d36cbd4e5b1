"""Emulated clusters for tests, skipped where impossible: fixtures ``cluster``, ``emulate`` and ``ssh_cluster``."""

import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from crews import Crew, MPIResult, chosen, in_crew, of_case_and_job, program, vendors
from settings import USUAL

from ucc_hetero.errors import LibraryNotFound
from ucc_hetero.launch.emulate import Cluster, unavailable
from ucc_hetero.native.libraries import load

#: Variables that ranks need: the seed of tests, and those of tests/sanitize.
PASSED_ON = (
    *("TESTS_DRAW", "SANITIZER", "SANITIZED_EXTENSION", "SANITIZED_BLOCKS", "ASAN_OPTIONS", "TSAN_OPTIONS"),
    *("PYTHONMALLOC", "PMIX_MCA_gds"),
)


class Patient(Cluster):
    """A cluster with the longer command timeout of the fixture ``mpirun``; set by `emulate`."""

    room = 1
    #: Words that start Python for ranks, by these variables.
    python: Callable[[Mapping[str, str]], list[str]]
    folder: Path

    @classmethod
    def warm(cls, argv, env):
        """Return words for a Python program that is forked from a process with its modules: see `Pythons`."""
        if list(argv[:2]) == [sys.executable, "-c"]:
            path = cls.folder / "program.py"
            path.write_text(argv[2])
            argv = [argv[0], str(path), *argv[3:]]
        program = "SANITIZER" not in os.environ and argv[0] == sys.executable and argv[1].endswith(".py")
        return [*cls.python(env), *argv[1:]] if program else list(argv)

    def _passed_on(self, env):
        return {name: os.environ[name] for name in PASSED_ON if name in os.environ} | dict(env)

    def mpirun(self, argv, *, env=None, **options):
        return super().mpirun(self.warm(argv, env or {}), env=self._passed_on(env or {}), **options)

    def command(self, argv, env):
        """Return words and environment with which the first host starts a job on all hosts."""
        words, own = self.warm(argv, env), self._passed_on(env)
        return ["mpirun", "-np", str(self.slots), *(word for name in own for word in ("-x", name)), *words], own

    def run(self, *args, timeout=60.0, **options):
        return super().run(*args, timeout=timeout * self.room, **options)


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def hosts(monkeypatch, room, pythons, request, tmp_path):
    """Prepare this process for starting clusters; skip the test if something is missing."""
    monkeypatch.setattr(Patient, "python", functools.partial(pythons.of, request.path), raising=False)
    monkeypatch.setattr(Patient, "folder", tmp_path, raising=False)
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    # A cluster has enough slots, and mpirun must respect them, whatever the environment of the tests says.
    monkeypatch.delenv("PRTE_MCA_rmaps_default_mapping_policy", raising=False)
    monkeypatch.delenv("OMPI_MCA_rmaps_base_oversubscribe", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(Patient, "room", room)


@pytest.fixture
def emulate(hosts):
    """Start a cluster with the arguments of `Cluster`; it ends with the test."""
    with ExitStack() as running:
        yield lambda *args, **options: running.enter_context(Patient(*args, **options))


def crew_on_hosts(slots, env, limit):
    """Return a crew on its own emulated hosts, which end with it."""
    cluster = Patient(hosts=len(slots), slots=slots, rate="none").start()

    def start(words, env, **options):
        argv, exported = cluster.command(words, env)
        return cluster.hosts[0].popen(argv, env=exported, **options)

    return Crew(start, [sys.executable], cluster.slots, env, limit, lambda _: cluster.kill_all(), cluster.close)


#: Ranks by host of the crews for cases of all layouts: without devices, and with fake ones.
PLAIN = (2, 2, 2)
FAKE = ("nvidia:2,amd:2,host:1", "nvidia:2,amd:2,host:1", "nvidia:1,amd:1", "nvidia:1")


def places(slots, layout):
    hosts = [host for host, count in enumerate(slots) for _ in range(count)]
    return list(zip(vendors(layout) if layout else [""] * len(hosts), hosts, strict=True))


@pytest.fixture
def host_crew(hosts, crews, request, tmp_path, room):
    """Call as ``host_crew(script, slots, args=(), devices={}, **env)`` -> MPIResult, for a script that succeeds. It is
    given as for `mpirun`.

    Its ranks, on hosts with these slots, have run other scripts before, some with other variables.
    ``devices``: variables of ranks with fake GPUs.
    """

    def run(script, slots, args=(), devices=None, **env):
        case, job = of_case_and_job({**(devices or {}), **env})
        layout = case.get("FAKEGPU_LAYOUT", "")
        pool, fakes = ([len(vendors(host)) for host in FAKE], ",".join(FAKE)) if layout else (PLAIN, "")
        if of_case_and_job(env)[1]:
            pool, fakes = slots, layout
        world = chosen(places(pool, fakes), places(slots, layout))
        job |= {"FAKEGPU_LAYOUT": fakes} if fakes else {}
        start = functools.partial(crew_on_hosts, pool, job, 60 * room)
        place = in_crew(tmp_path, script, args, request.path)
        return crews.run((*pool, *sorted(job.items())), start, world, *place, case, 60 * room)

    return run


@pytest.fixture
def on_crew(host_crew, fake_environment):
    """The same with a fake GPU for every rank and `USUAL`: ``on_crew(script, layout, hosts, slots, args=(), **env)``.
    UCX must not print warnings."""

    def run(script, layout, hosts, slots, args=(), **env):
        done = host_crew(script, [slots] * hosts, args, devices=fake_environment(layout), **USUAL | env)
        assert "UCX  ERROR" not in done.output, done.output
        return done

    return run


@pytest.fixture
def alone(emulate, fake_environment, request, tmp_path):
    """The same in a separate job: ``alone(script, layout, hosts, slots, args=(), links=1, rate="none", options=(),
    check=True, beside=None, **env)``; a thread calls ``beside(cluster)``."""

    def run(script, layout, hosts, slots, args=(), *, links=1, rate="none", options=(), check=True, beside=None, **env):
        cluster = emulate(hosts=hosts, slots=slots, links=links, rate=rate)
        if beside is not None:
            threading.Thread(target=beside, args=[cluster], daemon=True).start()
        words = [sys.executable, *program(tmp_path, script, args, request.path)]
        env = fake_environment(layout) | USUAL | env
        done = cluster.mpirun(words, env=env, options=options, timeout=120)
        result = MPIResult(done.returncode, done.stdout, done.stderr, hosts * slots)
        assert not check or (done.returncode == 0 and "UCX  ERROR" not in result.output), result.output
        return result

    return run


@pytest.fixture
def launch(emulate):
    """Call as ``launch(cluster, host, words, env=None)``: starts a process on a host, with its output on ``stdout``.

    At the test's end all of them and their children are killed; their output is shown if the test failed.
    """
    started = []

    def start(cluster, host, words, env=None):
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = Patient.warm(words, env or {})
        started.append((cluster, cluster.hosts[host].popen(words, env=env, **pipe)))
        return started[-1][1]

    yield start
    for _, process in started:
        process.kill()
    for cluster in dict(started):
        cluster.kill_all()
    for _, process in started:
        print(process.args, process.communicate()[0], sep="\n")


@pytest.fixture
def appear(room):
    """Call as ``appear(files, processes)``: wait for files that processes write, none of which may end meanwhile."""

    def wait(files, processes, seconds=60):
        until = time.monotonic() + seconds * room
        while not all(file.exists() for file in files):
            ended = [each for each in processes if each.poll() is not None]
            assert time.monotonic() < until and not ended, [each.communicate()[0] for each in ended]
            time.sleep(0.01)

    return wait


@pytest.fixture
def libraries():
    try:
        load()
    except LibraryNotFound as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.fixture
def cluster(emulate):
    return emulate(hosts=2, slots=2, rate="4gbit")


SSHD = """
Port 22
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
SetEnv {env}
"""

SSH = """
Host *
  IdentityFile {keys}/user
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  BatchMode yes
  ConnectTimeout 5
"""

#: sshd needs this folder; each host has its own /run, like real hosts.
START_SSHD = "mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec {sshd} -D -e -f {config}"

KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 22), 1)"


@pytest.fixture
def ssh_cluster(emulate, tmp_path):
    """Two hosts of two slots that OpenSSH reaches, with separate keys in ``tmp_path/keys``."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("no sshd: install openssh-server")
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(keys / name)]
        subprocess.run(words, check=True)
    (keys / "ssh_config").write_text(SSH.format(keys=keys))
    agents = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # without the stand-in for ssh
    chosen = dict.fromkeys(agents, f"ssh -F {keys / 'ssh_config'}")
    cluster = emulate(hosts=2, slots=2, env={**chosen, "PATH": path})
    with ExitStack() as servers:
        for host in cluster.hosts:
            config = keys / f"{host.name}.sshd"
            env = " ".join(f"{name}={value}" for name, value in host.env.items() if " " not in value)
            config.write_text(SSHD.format(keys=keys, env=env))
            start = ["sh", "-c", START_SSHD.format(sshd=sshd, config=config)]
            log = servers.enter_context((keys / f"{host.name}.log").open("w"))
            servers.enter_context(host.popen(start, stderr=log))
        # Before the servers' end, which waits for them.
        servers.callback(cluster.close)
        for host in cluster.hosts:
            deadline = time.monotonic() + 60
            while cluster.run([sys.executable, "-I", "-S", "-c", KNOCK, host.name]).returncode:
                assert time.monotonic() < deadline, (keys / f"{host.name}.log").read_text()
        yield cluster
