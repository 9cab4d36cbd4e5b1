"""Variables by which launchers tell a process its rank and the size of the job.

Only the standard library is imported: the launcher's wrapper of a rank loads this file alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

#: torchrun's variable -> MPI launchers' variables with the same number, most reliable first. In a heterogeneous Slurm
#: job PMIx knows a rank's number, and PMI does not.
MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}

#: torchrun's variable -> Slurm's, for ranks that ``srun`` starts.
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}

#: Prefixes of variables by which an MPI library knows that it is inside a job.
INSIDE_A_JOB = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED")

#: Process id of the rank, for its child processes: they are no ranks, whatever the launcher's variables say.
CHILD = "_UCC_HETERO_CHILD"

#: Prefixes of variables by which an MPI library joins its launcher's job as a rank.
_JOINING = ("PMIX_NAMESPACE", "PMIX_SERVER_URI", "PMI_FD", "PMI_PORT", "PMI_CONTROL_")

#: Prefixes of all variables of launchers, and of settings of MPI libraries.
PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "HYDI_", "HYDRA_")


def places(name: str, torchrun: bool = True) -> tuple[str, ...]:
    """The variables that may hold the number that torchrun calls ``name``, most reliable first."""
    return (*MPI[name], *filter(None, [SLURM.get(name)]), *((name,) if torchrun else ()))


def number(name: str, environ: Mapping[str, str], otherwise: int, torchrun: bool = True) -> int:
    """The number that torchrun calls ``name``, from any launcher's variables; ``otherwise`` if there is none. In a
    process of torchrun only torchrun's count."""
    nearest = (name,) if torchrun and "TORCHELASTIC_RUN_ID" in environ else ()
    found = (environ.get(place, "") for place in (*nearest, *places(name, torchrun)))
    return next((int(text) for text in found if text.isdigit()), otherwise)


def have_home(environ: MutableMapping[str, str]) -> None:
    """Set HOME if it is unset, as in systemd services and under ``env -i``: Open MPI ends at once without it."""
    if not environ.get("HOME"):
        home = os.path.expanduser("~")  # from the table of users
        environ["HOME"] = home if os.path.isabs(home) else "/"


def keep_from_children(environ: MutableMapping[str, str]) -> None:
    """Make this rank's child processes singletons in MPI: as the same rank once more they would crash Open MPI.

    MPI is initialised and no longer needs the variables. Those with ranks and sizes stay, as programs read them.
    """
    for name in [name for name in environ if name.startswith(_JOINING)]:
        del environ[name]
    environ[CHILD] = str(os.getpid())


def is_child(environ: Mapping[str, str]) -> bool:
    """True in a child process of a rank, unless another launcher has made that a rank."""
    mine = environ.get(CHILD, "") in ("", str(os.getpid()))
    return not mine and not any(name.startswith(_JOINING) for name in environ)
