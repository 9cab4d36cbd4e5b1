"""ucch-run on this machine with every launcher that it has: ranks, statuses, signals and time limits."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import is_free, until

from ucc_hetero.launch import launcher
from ucc_hetero.launch.__main__ import main
from ucc_hetero.machine.launchers import INSIDE_A_JOB

NAMES = ("mpirun", "mpirun.openmpi", "mpiexec.hydra")


def launchers():
    beside = Path(sys.executable).parent / "mpirun"
    paths = [str(beside) if beside.exists() else None, *map(shutil.which, NAMES)]
    found = {}
    for path in dict.fromkeys(path for path in paths if path):
        one = launcher.find({"MPIRUN": path})
        found.setdefault(f"{one.kind}-{one.version}", path)
    return found


HERE = launchers()
pytestmark = pytest.mark.skipif(not HERE, reason="no mpirun: install the extra 'mpi', or an MPI")


@pytest.fixture(params=HERE, ids=str)
def environment(request):
    env = {name: value for name, value in os.environ.items() if not name.startswith(INSIDE_A_JOB)}
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**env, **allow, "MPIRUN": HERE[request.param], "PYTHONUNBUFFERED": "1"}


def words(*arguments):
    return [sys.executable, "-m", "ucc_hetero.launch", *arguments]


@pytest.fixture
def ucch_run(environment):
    def run(*arguments, timeout=240):
        return subprocess.run(
            words(*arguments), env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


def python(script):
    return [sys.executable, "-I", "-S", "-c", script]


def test_ranks(ucch_run, tmp_path):
    """App contexts of two vendors on this machine, with emulated devices: numbers and variables."""
    path = tmp_path / "hostfile"
    path.write_text("localhost slots=2 vendor=nvidia\nlocalhost slots=1 vendor=amd\n")
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'UCCH_EMULATE', 'X')))"
    done = ucch_run("--hostfile", str(path), "--emulate", "-x", "X=a b", *python(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{r} {r} 3 nvidia:2,amd:1 a b" for r in range(3)]


def test_without_a_home(environment):
    """As in systemd services: Open MPI ends at once, which used to look as if mpirun were missing."""
    env = {name: value for name, value in environment.items() if name != "HOME"}
    script = "import sys, ucc_hetero; sys.stdout.write(f'right {ucc_hetero.Communicator().size}\\n')"  # in one piece
    program = [sys.executable, "-c", script]
    for command, ranks in ((words("-np", "2", *program), 2), (program, 1)):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
        assert done.stdout.count(f"right {ranks}") == ranks, done.stderr


def test_statuses(ucch_run):
    for number, said in ((11, "killed by SIGSEGV, the first to fail\n"), (9, "the first to fail: dmesg there says if")):
        done = ucch_run("-np", "2", *python(f"import os; os.kill(os.getpid(), {number})"))
        assert done.returncode == 128 + number and said in done.stderr, done.stderr
    done = ucch_run("-np", "2", *python("import ucc_hetero"))
    assert f"activate that environment, or name {sys.executable}" in done.stderr.splitlines()[-1], done.stderr
    done = ucch_run("-np", "2", "/no/such/program")
    assert done.returncode == 127
    assert "/no/such/program: No such file or directory" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("words", "said"), [
    (["-np", "0", "true"], "-np 0: must be at least 1"), (["-np", "2"], "no program: give it at the end"),
    (["-np", "2", "-x", "UCCH_NOT_SET", "true"], "-x UCCH_NOT_SET: the variable is not set here"),
    (["-np", "2", "--mpi-args", "--x", "true"], "expected one argument; use an equals sign"),
    (["-np", "2", "--bind-to", "core", "true"], "those of mpirun or srun go into --mpi-args='--x y'"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_starts(capsys, words, said):
    try:
        status = main(words)
    except SystemExit as ended:  # raised by argparse
        status = ended.code
    told = capsys.readouterr()
    assert (status, told.out) == (2, "") and "ucch-run: " in told.err and said in told.err, told.err


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_script_is_run_by_python(environment, tmp_path, mode):
    """Also an executable one without an interpreter line. Root, as in containers, needs no option."""
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:])")
    script.chmod(mode)
    env = {name: value for name, value in environment.items() if not name.startswith("OMPI_ALLOW_RUN_AS_ROOT")}
    command = words("--np", "2", str(script), "--lr", "0.1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "['--lr', '0.1']\n" * 2), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(environment, tmp_path, number):
    script = f"import os, time; open(r'{tmp_path}/' + str(os.getpid()), 'w'); print('up', flush=True); time.sleep(200)"
    with subprocess.Popen(
        words("-np", "2", *python(script)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait() == 128 + number
    assert said.splitlines()[-1] == f"ucch-run: ended by {number.name}"
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in pids), "ranks have stayed")


def test_nothing_stays_behind_launchers_that_are_killed(environment, tmp_path):
    """As by `timeout -s KILL`, which kills their process group: programs that wait to be killed, and their children."""
    locked = tmp_path / "locked"
    script = f"""
import fcntl, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = open({str(locked)!r}, "w")
fcntl.flock(lock, fcntl.LOCK_SH)
print("up", flush=True)
time.sleep(200)"""
    program = ["sh", "-c", f"{shlex.join(python(script))}; true"]
    with subprocess.Popen(
        words("-np", "2", *program), env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        os.killpg(process.pid, signal.SIGKILL)
    with locked.open() as lock:
        until(lambda: is_free(lock), "ranks have stayed")


def test_dry_run_is_what_runs(ucch_run):
    done = ucch_run("-np", "2", "--dry-run", *python("print('x')"))
    assert done.returncode == 0
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    again = subprocess.run(["sh", "-c", done.stdout], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert (again.returncode, again.stdout) == (0, "x\nx\n"), again.stderr
