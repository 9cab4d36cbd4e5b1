"""Emulated clusters for tests, skipped where impossible: fixtures ``cluster``, ``emulate`` and ``ssh_cluster``."""

import functools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from channel_jobs import USUAL
from crews import RANK, Crew, MPIResult, chosen, of_case_and_job, vendors

from ucc_hetero.errors import LibraryNotFound
from ucc_hetero.launch.emulate import Cluster, unavailable
from ucc_hetero.native.libraries import load

#: Variables of tests/sanitize that its ranks need.
SANITIZED = (
    *("SANITIZER", "SANITIZED_EXTENSION", "SANITIZED_BLOCKS", "ASAN_OPTIONS", "TSAN_OPTIONS"),
    *("PYTHONMALLOC", "PMIX_MCA_gds"),
)


class Patient(Cluster):
    """A cluster whose commands may take longer, as those of the fixture ``mpirun``; set by `emulate`."""

    room = 1
    #: Words that start Python for ranks with these variables.
    python: Callable[[Mapping[str, str]], list[str]]
    folder: Path

    @classmethod
    def warm(cls, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The words of a program of Python's, for one that is forked where its modules are: see `Pythons`."""
        if list(argv[:2]) == [sys.executable, "-c"]:
            path = cls.folder / "program.py"
            path.write_text(argv[2])
            argv = [argv[0], str(path), *argv[3:]]
        program = "SANITIZER" not in os.environ and argv[0] == sys.executable and argv[1].endswith(".py")
        return [*cls.python(env), *argv[1:]] if program else list(argv)

    def _sanitized(self, env: Mapping[str, str]) -> dict[str, str]:
        return {name: os.environ[name] for name in SANITIZED if name in os.environ} | dict(env)

    def mpirun(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        return super().mpirun(self.warm(argv, env or {}), env=self._sanitized(env or {}), **options)

    def command(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Words and environment by which the first host starts a job on all of them."""
        words, own = self.warm(argv, env), self._sanitized(env)
        return ["mpirun", "-np", str(self.slots), *(word for name in own for word in ("-x", name)), *words], own

    def run(self, *args: Any, timeout: float = 60.0, **options: Any) -> Any:
        return super().run(*args, timeout=timeout * self.room, **options)


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def hosts(
    monkeypatch: pytest.MonkeyPatch, room: int, pythons: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """This process as it has to be where clusters are started; without what they need the test is skipped."""
    monkeypatch.setattr(Patient, "python", functools.partial(pythons.of, request.path), raising=False)
    monkeypatch.setattr(Patient, "folder", tmp_path, raising=False)
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    # A cluster has slots enough, and mpirun must keep to them: whoever runs the tests may have asked for the contrary.
    monkeypatch.delenv("PRTE_MCA_rmaps_default_mapping_policy", raising=False)
    monkeypatch.delenv("OMPI_MCA_rmaps_base_oversubscribe", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(Patient, "room", room)


@pytest.fixture
def emulate(hosts: None) -> Iterator[Callable[..., Cluster]]:
    """Call with the arguments of `Cluster` -> a running one, which ends with the test."""
    with ExitStack() as running:
        yield lambda *args, **options: running.enter_context(Patient(*args, **options))


def crew_on_hosts(slots: Sequence[int], env: Mapping[str, str], limit: float) -> Crew:
    """A crew on emulated hosts of its own, which end with it."""
    cluster = Patient(hosts=len(slots), slots=slots, rate="none").start()

    def start(words: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        argv, exported = cluster.command(words, env)
        return cluster.hosts[0].popen(argv, env=exported, **options)

    return Crew(start, [sys.executable], cluster.slots, env, limit, lambda _: cluster.kill_all(), cluster.close)


#: Ranks of the crews that take cases of all layouts, by host: without devices, and with fake ones.
PLAIN = (2, 2, 2)
FAKE = ("nvidia:2,amd:2,host:1", "nvidia:2,amd:2,host:1", "nvidia:1,amd:1", "nvidia:1")


def places(slots: Sequence[int], layout: str) -> list[tuple[str, int]]:
    hosts = [host for host, count in enumerate(slots) for _ in range(count)]
    return list(zip(vendors(layout) if layout else [""] * len(hosts), hosts, strict=True))


@pytest.fixture
def host_crew(hosts: None, crews: Any, tmp_path: Path, room: int) -> Callable[..., Any]:
    """Call as ``host_crew(script, slots, args=(), devices={}, **env)`` -> MPIResult; a script that ends well.

    Its ranks, on hosts of so many slots each, have run other scripts before, of which some variables may have been
    others. ``devices``: variables of ranks with fake GPUs.
    """

    def run(
        script: str | Path, slots: Sequence[int], args: Sequence[str] = (), devices: Mapping[str, str] | None = None,
        **env: str,
    ) -> Any:  # fmt: skip
        path = tmp_path / "job.py"
        if isinstance(script, Path):
            path = script
        else:
            path.write_text(script)
        case, job = of_case_and_job({**(devices or {}), **env})
        layout = case.get("FAKEGPU_LAYOUT", "")
        pool, fakes = ([len(vendors(host)) for host in FAKE], ",".join(FAKE)) if layout else (PLAIN, "")
        if of_case_and_job(env)[1]:
            pool, fakes = slots, layout
        world = chosen(places(pool, fakes), places(slots, layout))
        job |= {"FAKEGPU_LAYOUT": fakes} if fakes else {}
        start = functools.partial(crew_on_hosts, pool, job, 60 * room)
        return crews.run(
            (*pool, *sorted(job.items())), start, world, RANK, "script", [str(path), *args], case, 60 * room
        )

    return run


@pytest.fixture
def on_crew(host_crew: Callable[..., Any], fake_environment: Any) -> Callable[..., Any]:
    """The same with a fake GPU for every rank and `USUAL`: ``on_crew(script, layout, hosts, slots, **env)``; it ends
    without a complaint of UCX's."""

    def run(script: str, layout: str, hosts: int, slots: int, **env: str) -> Any:
        done = host_crew(script, [slots] * hosts, devices=fake_environment(layout), **USUAL | env)
        assert "UCX  ERROR" not in done.output, done.output
        return done

    return run


@pytest.fixture
def alone(
    emulate: Callable[..., Cluster], fake_environment: Callable[[str], dict[str, str]], tmp_path: Path
) -> Callable[..., Any]:
    """The same in a job of its own: ``alone(script, layout, hosts, slots, links=1, rate="none", options=(), check=True,
    beside=None, **env)``; a thread calls ``beside(cluster)``."""

    def run(
        script: str, layout: str, hosts: int, slots: int, *, links: int = 1, rate: str = "none", options: Any = (),
        check: bool = True, beside: Callable[[Cluster], None] | None = None, **env: str,
    ) -> MPIResult:  # fmt: skip
        cluster = emulate(hosts=hosts, slots=slots, links=links, rate=rate)
        if beside is not None:
            threading.Thread(target=beside, args=[cluster], daemon=True).start()
        job = tmp_path / "job.py"
        job.write_text(script)
        env = fake_environment(layout) | USUAL | env
        done = cluster.mpirun([sys.executable, str(job)], env=env, options=options, timeout=120)
        result = MPIResult(done.returncode, done.stdout, done.stderr, hosts * slots)
        assert not check or (done.returncode == 0 and "UCX  ERROR" not in result.output), result.output
        return result

    return run


@pytest.fixture
def launch(emulate: Callable[..., Cluster]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Call as ``launch(cluster, host, words, env=None)``: a process on a host, with what it prints on its ``stdout``.

    With the test all of them end, and whatever they have started; what they printed is shown where it has failed.
    """
    started: list[tuple[Cluster, subprocess.Popen[str]]] = []

    def start(
        cluster: Cluster, host: int, words: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
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
def appear(room: int) -> Callable[..., None]:
    """Call as ``appear(files, processes)``: wait for files of processes of which none may end meanwhile."""

    def wait(files: Iterable[Path], processes: Iterable[subprocess.Popen[str]], seconds: float = 60) -> None:
        until = time.monotonic() + seconds * room
        while not all(file.exists() for file in files):
            ended = [each for each in processes if each.poll() is not None]
            assert time.monotonic() < until and not ended, [each.communicate()[0] for each in ended]
            time.sleep(0.01)

    return wait


@pytest.fixture
def libraries() -> None:
    try:
        load()
    except LibraryNotFound as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.fixture
def cluster(emulate: Callable[..., Cluster]) -> Cluster:
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

#: sshd wants this folder; a host has a /run of its own, as real ones do.
START_SSHD = "mount -t tmpfs tmpfs /run && mkdir /run/sshd && exec {sshd} -D -e -f {config}"

KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 22), 1)"


@pytest.fixture
def ssh_cluster(emulate: Callable[..., Cluster], tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts of two slots that are reached through OpenSSH, with keys of their own in ``tmp_path/keys``."""
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
        # Before the servers' own, which wait for them.
        servers.callback(cluster.close)
        for host in cluster.hosts:
            deadline = time.monotonic() + 60
            while cluster.run([sys.executable, "-I", "-S", "-c", KNOCK, host.name]).returncode:
                assert time.monotonic() < deadline, (keys / f"{host.name}.log").read_text()
        yield cluster
