"""Jobs whose ranks run a case, and their expected end."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: A job that waits for its calls' timeout is killed before that.
NEVER, SOON = {"UCCH_TIMEOUT": "1000"}, {"UCCH_TIMEOUT": "2"}


class Job(NamedTuple):
    """A case, as ``mpirun`` takes it; its ranks, and their expected end."""

    case: str
    ranks: int = 2
    args: Sequence[Any] = ()
    #: Regular expression -> number of matches in standard output. None: any in all output; 0: none in all output.
    said: Mapping[str, int | None] = {}
    #: mpirun's exit status; None: any except 0.
    status: int | None = 0
    env: Mapping[str, str] = {"UCCH_TIMEOUT": "200"}
    more: Mapping[str, Any] = {}

    def __str__(self):
        return ", ".join(map(str, [self.case.partition(":")[2], *self.args, *self.more.values()]))

    def run(self, start, **more):
        """Run it with ``mpirun``, or with ``crew``, whose ranks must succeed, and check its end."""
        done = start(self.case, self.ranks, args=self.args, env=self.env, **self.more, **more)
        assert (done.returncode == self.status) if self.status is not None else done.returncode, done.output
        for pattern, count in self.said.items():
            found = len(re.findall(pattern, done.stdout if count else done.output, re.M))
            assert found == count if count is not None else found, (pattern, found, done.output)
        return done
