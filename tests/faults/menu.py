"""The faults, and how a seed chooses one: victims, moment, and job."""

import json
import random
from dataclasses import asdict, dataclass

#: Timeout of calls (``UCCH_TIMEOUT``) in seconds.
TIMEOUT = 8

MOMENTS = ("init", "collective", "message", "partitioned", "put", "teams", "free", "shrink", "finalize")
#: Faults that end the victim.
DEADLY = ("kill", "exit", "throw", "segfault")
#: Faults that the victim survives and applies itself.
INSIDE = ("stop", "hold", "memory", "descriptors")
#: Faults applied from outside: the victim is stopped and continued several times.
PROCESS = ("slow",)
#: Faults of the victim's host: its link is cut for good, loses all frames for good, or repeatedly.
NETWORK = ("cut", "hole", "off", "lossy", "slow link")
FAULTS = (*DEADLY, *INSIDE, *PROCESS, *NETWORK)


@dataclass(frozen=True)
class Trial:
    """A job, and the fault that happens in it."""

    seed: int
    #: The exchange of ranks: MPI with fault tolerance ("ulfm"), plain MPI ("mpi"), or torch's store ("store").
    exchange: str
    slots: tuple[int, ...]
    #: ``UCCH_EMULATE``, or with ``gpu`` the layout of fake GPUs.
    vendors: str
    gpu: bool
    fault: str
    moment: str
    #: With several victims and moment shrink or after, the first is killed before; with after, the others die one by
    #: one, each once the survivors of the previous death have gone on. No seed draws that moment.
    victims: tuple[int, ...]
    #: Number of the moment's operation at which the fault is armed, and seconds until it happens.
    at: int
    delay: float
    timeout: float = TIMEOUT

    @property
    def size(self):
        return sum(self.slots)

    def host(self, rank):
        return next(h for h in range(len(self.slots)) if rank < sum(self.slots[: h + 1]))

    @property
    def lost(self):
        """Ranks that need not answer: victims that die, or all ranks of an unreachable host."""
        opener = self.victims[:1] if self.moment in ("shrink", "after") else ()
        if self.fault in ("cut", "hole", "off"):
            return (*opener, *(r for r in range(self.size) if self.host(r) == self.host(self.victims[-1])))
        return (*opener, *self.victims) if self.fault in (*DEADLY, "stop") else opener

    @property
    def bears_it(self):
        """True if all ranks must finish without an error, despite the fault."""
        return self.fault == "slow" and self.moment not in ("shrink", "after")

    def text(self):
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text):
        fields = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def _vendors(draw, size):
    if draw.random() < 0.25 or size < 2:
        return f"{draw.choice(['nvidia', 'amd'])}:{size}"
    first = draw.randint(1, size - 1)
    return f"nvidia:{first},amd:{size - first}"


def draw(seed, hosts=0, fault=None):
    """The trial of a seed. ``hosts``: 1 or 2, or 0 to let the seed choose."""
    rng = random.Random(seed)
    two = rng.random() < 0.5
    slots = (2, 2) if (two if not hosts else hosts == 2) else (rng.randint(2, 6),)
    size = sum(slots)
    any_fault = rng.choice(FAULTS if len(slots) > 1 else FAULTS[: -len(NETWORK)])
    fault = fault or any_fault
    moments = [moment for moment in MOMENTS if moment != "shrink" or size > 2]
    moment = rng.choice(moments)
    exchange = rng.choices(["ulfm", "store", "mpi"], [5, 4, 1])[0]
    if exchange == "mpi" and moment == "shrink":
        exchange = "ulfm"
    if fault in ("cut", "hole", "off"):  # a cut link also ends mpirun's daemons
        exchange = "store"
    count = 2 if moment == "shrink" or (size > 3 and rng.random() < 0.25) else 1
    if fault == "slow":
        count = rng.randint(count, size)
    longest = 0.3 if moment in ("init", "finalize") else 0.02
    return Trial(
        seed, exchange, slots, _vendors(rng, size), rng.random() < 0.35, fault, moment,
        tuple(rng.sample(range(size), count)), rng.randint(0, 12), longest * rng.random() ** 3,
    )  # fmt: skip
