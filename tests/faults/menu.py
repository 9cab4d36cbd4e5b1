"""Menu of faults, and what a seed chooses from it: who, when, and in which job."""

import json
import random
from dataclasses import asdict, dataclass

#: Deadline of a call (``UCCH_TIMEOUT``); seconds.
TIMEOUT = 8

MOMENTS = ("init", "collective", "message", "partitioned", "put", "teams", "free", "shrink", "finalize")
#: The victim ends.
DEADLY = ("kill", "exit", "throw", "segfault")
#: The victim lives, and sees to it itself.
INSIDE = ("stop", "hold", "memory", "descriptors")
#: Done to it from outside: it is stopped and goes on, several times.
PROCESS = ("slow",)
#: Done to its host. A link that is cut for good, or from which nothing comes any more, or that does so again and again.
NETWORK = ("cut", "hole", "off", "lossy", "slow link")
FAULTS = (*DEADLY, *INSIDE, *PROCESS, *NETWORK)


@dataclass(frozen=True)
class Trial:
    """One job and what happens in it."""

    seed: int
    #: How ranks exchange what is no data: MPI with fault tolerance ("ulfm"), MPI as it is ("mpi"), torch's store.
    exchange: str
    slots: tuple[int, ...]
    #: ``UCCH_EMULATE`` or, with ``gpu``, the layout of fake GPUs.
    vendors: str
    gpu: bool
    fault: str
    moment: str
    #: Of several, where the moment is shrink or after, the first is killed beforehand; after: the others one by one,
    #: each once the survivors of the one before have gone on, in a moment that no seed draws.
    victims: tuple[int, ...]
    #: Number of the moment's operation at which the fault is armed, and seconds from there.
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
        """Ranks that need not answer: victims of what they do not outlive, or all of a host that is out of reach."""
        opener = self.victims[:1] if self.moment in ("shrink", "after") else ()
        if self.fault in ("cut", "hole", "off"):
            return (*opener, *(r for r in range(self.size) if self.host(r) == self.host(self.victims[-1])))
        return (*opener, *self.victims) if self.fault in (*DEADLY, "stop") else opener

    @property
    def bears_it(self):
        """True if all ranks are to come to a good end, whatever befalls them."""
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
    """The trial of a seed; ``hosts``: 1 or 2, where not the seed is to choose."""
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
    if fault in ("cut", "hole", "off"):  # mpirun's own daemons end with the link between them
        exchange = "store"
    count = 2 if moment == "shrink" or (size > 3 and rng.random() < 0.25) else 1
    if fault == "slow":
        count = rng.randint(count, size)
    longest = 0.3 if moment in ("init", "finalize") else 0.02
    return Trial(
        seed, exchange, slots, _vendors(rng, size), rng.random() < 0.35, fault, moment,
        tuple(rng.sample(range(size), count)), rng.randint(0, 12), longest * rng.random() ** 3,
    )  # fmt: skip
