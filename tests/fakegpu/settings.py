"""Environments of ranks on fake GPUs, and ways in which their devices behave."""

from ucc_hetero.planner.collectives import ROWS

#: Streams share a few queues and copy engines, as in HIP, and wait for work that has begun.
FEW_QUEUES = {"UCCH_HOLD": "n", "FAKEGPU_CONNECTIONS": "4", "HSA_ENABLE_SDMA": "1"}
#: Ranks hold streams until other streams progress, in any order: every stream has its own queue.
OWN_QUEUES = {"FAKEGPU_CONNECTIONS": "0"}
#: Kernels are loaded at their first launch, which waits for the device and blocks the driver.
LATE_KERNELS = {"FAKEGPU_LAZY": "1", "HIP_ENABLE_DEFERRED_LOADING": "1"}
#: Every collective as messages, as the fake GPUs have no vendor library for an island's part in a stream; on fast
#: devices.
USUAL = {"UCCH_TUNE": "#".join(f"{name}:@flat" for name in ROWS if name != "barrier"), "FAKEGPU_DELAY_US": "20"}
