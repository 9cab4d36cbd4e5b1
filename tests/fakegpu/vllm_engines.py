"""Controls engines of vllm_engine.py for tests, on this host or another; prompts for them."""

import contextlib
import json
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

#: Timeout for steps that take one or two seconds.
PATIENCE = 400
USUAL = {"vendor": "", "layout": "NHD", "blocks": 64, "scheduler": "own"}


class Engine:
    """A process of vllm_engine.py, started by ``popen`` with these words for Python."""

    def __init__(self, told, popen, python=(sys.executable,)):
        command = [*python, str(Path(__file__).with_name("vllm_engine.py")), json.dumps(told)]
        self.process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said = queue.Queue()
        self._done = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
            else:
                print(line, end="")  # such as libucp's last output

    def tell(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def add(self, name, prompt, tokens, params=None):
        self.tell(add=name, prompt=prompt, tokens=tokens, params=params)

    def hear(self, key):
        """Return the next answer with this key; finished requests are kept for :meth:`done`."""
        until = time.monotonic() + PATIENCE
        while True:
            said = self._said.get(timeout=max(0.1, until - time.monotonic()))
            if key in said:
                return said
            assert "error" not in said, said["error"]
            if "done" in said:
                self._done[said["done"]] = said

    def done(self, name):
        while name not in self._done:
            said = self.hear("done")
            self._done[said["done"]] = said
        return self._done.pop(name)

    def free(self, least):
        until = time.monotonic() + PATIENCE
        while True:
            self.tell(free=None)
            if (found := self.hear("free"))["free"] >= least:
                return found
            assert time.monotonic() < until, f"{found['free']} of {least} blocks have been freed"
            time.sleep(0.05)

    def prefilled(self, name, prompt):
        """Return ``kv_transfer_params`` of a computed prompt, as the proxy gets them."""
        self.add(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        return self.done(name)["params"]

    def end(self, how=None):
        if how is not None:
            self.process.send_signal(how)
        if self.process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.process.stdout.close()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def prompts(longest, *most):
    """Return prompts of any length, from one token to several chunks; besides the usual three some with a limit."""
    lengths = [1, 16, 33, longest, *(random.randint(2, each) for each in most)]
    return {f"r{i}": [random.randrange(256) for _ in range(length)] for i, length in enumerate(lengths)}


def one_engine(start, asked, tokens, **told):
    alone = start("", blocks=200, **told)
    for name, prompt in asked.items():
        alone.add(name, prompt, tokens)
    found = {name: alone.done(name)["tokens"] for name in asked}
    alone.end()
    return found
