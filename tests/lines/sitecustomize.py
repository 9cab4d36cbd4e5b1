"""Makes ranks print whole lines, so that lines of several ranks do not mix.

The fixture `mpirun` puts this folder last in PYTHONPATH; the interpreter imports a module of this name by itself.
"""

import sys

for stream in (sys.stdout, sys.stderr):
    if stream is not None:
        stream.reconfigure(line_buffering=True, write_through=False)  # unbuffered print() writes each word separately
