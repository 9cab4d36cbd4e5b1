"""The UCX and UCC that a process uses, whatever was imported first, and its messages about them."""

import pytest
from processes import python

pytestmark = pytest.mark.usefixtures("hooked")


def test_ours_first(mpirun):
    job = mpirun("script_cases:imported", args=["ours"], cold=True)
    lines = [line for line in job.stdout.splitlines() if line.startswith("ucx")]
    assert len(lines) == 2 and all(line.endswith(" -") for line in lines), job.output


def test_mpi_first(mpirun):
    """MPI's UCX then serves both; if it differs from the one this package would load, a note says so."""
    job = mpirun("script_cases:imported", args=["MPI"], cold=True)
    for line in job.stdout.splitlines():
        if line.startswith("ucx") and "/libucx/" not in line.split()[1] and "was not used" in line:
            assert "import ucc_hetero before mpi4py.MPI" in line


OURS = "import ucc_hetero; ucc_hetero.Communicator()"
#: A library of MPI's that cannot be loaded; the communicator repeats the error.
NO_MPI = r"""
import ucc_hetero
from mpi4py import _mpiabi
def none(libmpi=None):
    raise RuntimeError("cannot load MPI library\n  libmpi.so: no such file")
_mpiabi._dlopen_libmpi = none
try:
    from mpi4py import MPI
except ImportError:
    ucc_hetero.Communicator()
"""
LACKS = "UCCH_UCX_DIR=/: / lacks libucs.so.0; name the folder of a UCX"
OTHER_MPI = "=3: a launcher has started 3 ranks, but each is alone in its MPI"
NO_LAUNCHER = "{} has started 3 ranks, but each is alone in its MPI: {}"
#: Processes that no mpirun has started, and that must fail: their script, their variables, and their messages.
ALONE = {
    "a wrong choice of UCX": (OURS, {"UCCH_UCX_DIR": "/"}, (LACKS,)),
    # The variable used to be ignored if MPI had loaded a UCX.
    "a wrong choice of UCX, MPI first": ("from mpi4py import MPI; " + OURS, {"UCCH_UCX_DIR": "/"}, (LACKS,)),
    # Each rank used to be a job of its own, with its own results and status 0.
    "Hydra's launcher": (OURS, {"PMI_SIZE": "3"}, ("PMI_SIZE" + OTHER_MPI,)),
    "Open MPI's launcher": (OURS, {"OMPI_COMM_WORLD_SIZE": "3"}, ("OMPI_COMM_WORLD_SIZE" + OTHER_MPI,)),
    "torchrun": (OURS, {"WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"},
                 (NO_LAUNCHER.format("torchrun", "start the script with mpirun"),)),
    "srun": (OURS, {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"},
             (NO_LAUNCHER.format("srun", "srun --mpi=pmix"),)),
    "no MPI": (NO_MPI, {}, ("mpi4py finds no MPI library (libmpi.so): install one", "MPI4PY_LIBMPI",
                            "It tried: libmpi.so: no such file\n")),
    # MPI would end the process.
    "MPI has not begun": ("import mpi4py; mpi4py.rc.initialize = False; " + OURS, {},
                          ("NotSupported: MPI has not begun: call MPI.Init_thread()",)),
    "MPI is over": ("from mpi4py import MPI; MPI.Finalize(); " + OURS, {}, ("NotSupported: MPI has been finalized",)),
    # A free-threaded CPython without the GIL: the message names the cure.
    "no lock of the interpreter": ("import sys; sys._is_gil_enabled = lambda: False; import ucc_hetero", {},
                                   ("ImportError", "PYTHON_GIL=1")),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_a_process_that_cannot_begin(name):
    script, env, said = ALONE[name]
    done = python(script, env=env, check=False)
    assert done.returncode != 0 and all(words in done.stderr for words in said), done.stderr


def test_log_files_have_the_ranks_names(mpirun, tmp_path):
    """From the first line on: the rank was not known when the file was opened."""
    env = {"UCCH_LOG_LEVEL": "info", "UCCH_LOG_FILE": f"{tmp_path}/%r.log"}
    mpirun("script_cases:opened", args=[{}], env=env)
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert sorted(logs) == ["0.log", "1.log"], logs
    assert all(f" [{name[0]}/host] UCCH INFO " in text for name, text in logs.items()), logs


def test_ranks_with_different_settings_are_refused_with_a_table(mpirun):
    values = {"UCC_TL_UCP_TUNE": [f"allreduce:@{rank}" for rank in range(3)]}
    job = mpirun("script_cases:refused", 3, args=[values], cold=True)
    lines = [line for line in job.stdout.splitlines() if line.startswith("refused: AgreementError")]
    assert len(lines) == 3, job.output
    assert all("UCC_TL_UCP_TUNE" in line and "allreduce:@2" in line and "rank 1" in line for line in lines)


def test_a_wrong_layout_is_refused_on_every_rank(mpirun):
    # Ranks of a crew may keep their places from an earlier case.
    job = mpirun("script_cases:refused", 3, args=[{}], env={"UCCH_EMULATE": "nvidia:2,amd:2"}, cold=True)
    said = "UCCH_EMULATE: 'nvidia:2,amd:2' places 4 ranks, but there are 3 (1 frames)"
    assert job.stdout.count(said) == 3, job.output
