"""Scripts of ranks on the fake GPU library, on one host and on several."""

from pathlib import Path

#: Environment of ranks whose streams share a few queues and copy engines, as in HIP, and wait for work that has begun.
FEW_QUEUES = {"UCCH_HOLD": "n", "FAKEGPU_CONNECTIONS": "4", "HSA_ENABLE_SDMA": "1"}
#: Environment of ranks that hold streams until other streams progress, in any order: every stream has its own queue.
OWN_QUEUES = {"FAKEGPU_CONNECTIONS": "0"}
#: Kernels are loaded at their first launch, which waits for the device and blocks the driver.
LATE_KERNELS = {"FAKEGPU_LAZY": "1", "HIP_ENABLE_DEFERRED_LOADING": "1"}


HERE = Path(__file__).parents[1] / "mpi"


def program(name, *args):
    """Return a script that is a program of tests/mpi, with its data on devices."""
    return f"""
import runpy, sys
import arrays  # before a communicator is made
sys.path.insert(0, {str(HERE)!r})
sys.argv[1:] = {args!r}
runpy.run_path({str(HERE / name)!r}, run_name="__main__")
"""


COLLECTIVES = program("collective_cases.py")
MISTAKES = program("refusal_cases.py", "15")

STREAMS = """
from ranks import *
N = 3000
sleep_with_gil = ctypes.PyDLL(None).usleep

def launch(comm):
    "One collective between two kernels, held until everything was issued; True when the result is right."
    gpu = runtime()
    gpu.use(comm._runner.members.place.device)
    stream, x, y = gpu.stream(), Array(N), Array(N)
    gate = Gate(stream)
    x.fill(stream, comm.rank + 1.0)
    request = comm.Iallreduce(x, y, stream=stream)
    y.scale(stream, 3.0)
    gate.open()
    got = y.copied(stream)
    request.Wait()
    return bool((got == comm.size * (comm.size + 1) / 2 * 3).all())

def alone(comm, rounds, failures):
    for _ in range(rounds):
        if not launch(comm):
            failures.append(comm.rank)

with Communicator() as comm:
    for _ in range(5):
        assert launch(comm)
    # Without Python: a thread that holds the GIL delays nothing.
    gpu, x, y = runtime(), Array(N), Array(N)
    stream, done = gpu.stream(), gpu.event()
    x.fill(stream, 1.0)
    requests = [comm.Iallreduce(x, y, stream=stream) for _ in range(3)]
    done.record(stream.handle)
    for _ in range(400):
        if done.done():
            break
        sleep_with_gil(50000)
    assert done.done() and (y.peek == comm.size).all()
    del requests  # nobody waits for them
    comm.Ibarrier(stream=stream)
    # Several communicators, streams and threads.
    with Communicator(comm) as second:
        failures = []
        threads = [threading.Thread(target=alone, args=(c, 5, failures)) for c in (comm, second)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failures
"""

REFUSALS = """
from ranks import *

def refused(kind, text, call, *args, **keywords):
    with pytest.raises(kind) as caught:
        call(*args, **keywords)
    assert text in str(caught.value) and f"rank {comm.rank}" in str(caught.value)

with Communicator() as comm:
    gpu, place = runtime(), comm._runner.members.place
    x, host = Array(8).set(1), np.ones(8, np.float32)
    refused(ValueError, "both must be in one place", comm.Allreduce, x, host)
    gpu.use(3 - place.device)
    elsewhere = Array(8)
    gpu.use(place.device)
    refused(DeviceError, f"works with device {place.device}", comm.Allreduce, elsewhere, x)
    gone = Array(8)
    gone.block.handle, kept = 4096, gone.block.handle
    refused(BufferError, "freed", comm.Allreduce, gone, x)
    gone.block.handle = kept
    late = Array(8)
    again = comm.Send_init(late, 1 - comm.rank, 3)
    late.block.close()
    refused(DeviceError, "freed", again.Start)
    gaps = type("Gaps", (), {})()
    gaps.__cuda_array_interface__ = {**x.__cuda_array_interface__, "shape": (4,), "strides": (8,)}
    refused(BufferError, "contiguous", comm.Allreduce, gaps, Array(4))
    # The thread's device stays what the caller has chosen.
    gpu.use(3 - place.device)
    comm.Allreduce(x, x)
    assert gpu.current() == 3 - place.device and (x.peek == comm.size).all()
    gpu.use(place.device)
    try:
        comm.Allreduce(*((x, Array(8)) if comm.rank else (host, host.copy())))
    except MismatchError as error:
        print("mismatch", error)
"""

TIMEOUT = """
from ranks import *
comm = Communicator()
gpu, x, y = runtime(), Array(64), Array(64)
stream, done = gpu.stream(), gpu.event()
if comm.rank == 0:
    comm._runner.timeout = 2.0
    request = comm.Iallreduce(x, y, stream=stream)
    done.record(stream.handle)
    try:
        request.Wait()
    except CollectiveTimeout as error:
        while not done.done():
            time.sleep(0.001)
        print("right:", error)
comm.mpi.Barrier()
"""

#: A call of the driver fails on one rank: it says which, and the others which rank has given up; a new communicator is
#: whole.
DRIVER = """
from ranks import *
first = Communicator()
gpu = runtime()
gpu.use(first._runner.members.place.device)
driver, stream, who = ctypes.CDLL(gpu.path), gpu.stream(), first.size - 1
x, y = Array(100_000).set(1), Array(100_000)

def work(comm):
    comm.Allreduce(x, y.set(-1))
    comm.Iallreduce(x, y, stream=stream).Wait()
    assert (y.peek == comm.size).all()

work(first)
for name in os.environ["FAILING"].split():
    with Communicator() as comm:
        work(comm)
        comm.mpi.Barrier()
        if comm.rank == who:
            driver.fakegpu_fail(name.encode(), 0)
        words = rf"FAKE_ERROR \\(719\\)" if comm.rank == who else f"rank {who} (has given up|refused)"
        with pytest.raises((CollectiveError, DeviceError), match=words):
            for _ in range(3):
                work(comm)
work(first)
"""
