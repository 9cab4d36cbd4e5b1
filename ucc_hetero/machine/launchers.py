"""Variables by which launchers tell a process its place in a job.

Needs nothing but the standard library: the launcher's wrapper of a rank loads this file alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

#: Variable of torchrun -> where MPI's launchers put the same number, in the order of trust. Under Slurm PMIx knows a
#: rank's number in a heterogeneous job, and PMI does not.
MPI = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}

#: Variable of torchrun -> Slurm's, for ranks that ``srun`` starts.
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}

#: First letters of the variables by which an MPI library knows that it is inside a job already.
INSIDE_A_JOB = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED")

#: The rank's process number, for processes that it starts: they are alone in MPI whatever the launcher's variables say.
CHILD = "_UCC_HETERO_CHILD"

#: First letters of the variables by which an MPI library joins its launcher's job, as one of its ranks.
_JOINING = ("PMIX_NAMESPACE", "PMIX_SERVER_URI", "PMI_FD", "PMI_PORT", "PMI_CONTROL_")

#: First letters of all variables of launchers, and of the settings of MPI libraries.
PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "SLURM_", "HYDI_", "HYDRA_")


def places(name: str, torchrun: bool = True) -> tuple[str, ...]:
    """The variables that may hold the number that ``torchrun`` calls ``name``, in the order of trust."""
    return (*MPI[name], *filter(None, [SLURM.get(name)]), *((name,) if torchrun else ()))


def number(name: str, environ: Mapping[str, str], otherwise: int, torchrun: bool = True) -> int:
    """The number that torchrun calls ``name``, by any launcher's variables but in a process of torchrun's; or
    ``otherwise``."""
    nearest = (name,) if torchrun and "TORCHELASTIC_RUN_ID" in environ else ()
    found = (environ.get(place, "") for place in (*nearest, *places(name, torchrun)))
    return next((int(text) for text in found if text.isdigit()), otherwise)


def have_home(environ: MutableMapping[str, str]) -> None:
    """Set HOME where it is not, as in services of systemd and under ``env -i``: Open MPI ends at once without it."""
    if not environ.get("HOME"):
        home = os.path.expanduser("~")  # what the system's table of users says
        environ["HOME"] = home if os.path.isabs(home) else "/"


def keep_from_children(environ: MutableMapping[str, str]) -> None:
    """Let processes that this rank starts be alone in MPI. They would be this rank once more, which crashes Open MPI's.

    MPI has begun and needs the variables no more. Those that tell ranks and sizes stay, as programs read them.
    """
    for name in [name for name in environ if name.startswith(_JOINING)]:
        del environ[name]
    environ[CHILD] = str(os.getpid())


def is_child(environ: Mapping[str, str]) -> bool:
    """True in a process that a rank has started, unless that is another launcher's rank."""
    mine = environ.get(CHILD, "") in ("", str(os.getpid()))
    return not mine and not any(name.startswith(_JOINING) for name in environ)
