"""A torch Store in a folder that all hosts share."""

import contextlib
import os


class Store:
    """Store for communicators without MPI. Ranks of a host whose link is ``cut`` cannot reach it."""

    def __init__(self, folder, host):
        self._folder, self._cut = folder, folder / f"cut{host}"
        folder.mkdir(exist_ok=True)

    def clone(self):
        return self

    def _path(self, key):
        if self._cut.exists():
            raise ConnectionError("the store is on a host that is out of reach")
        return self._folder / key.replace("/", "+")

    def _part(self, value):
        part = self._folder / f".{os.urandom(8).hex()}"
        part.write_bytes(value if isinstance(value, bytes) else value.encode())
        return part

    def set(self, key, value):
        self._part(value).rename(self._path(key))

    def get(self, key):
        return self._path(key).read_bytes()

    def delete_key(self, key):
        with contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()
            return True
        return False

    def check(self, keys):
        return all(self._path(key).exists() for key in keys)

    def compare_set(self, key, expected, value):
        assert not expected
        part = self._part(value)
        with contextlib.suppress(FileExistsError):
            os.link(part, self._path(key))
        part.unlink()
        return self.get(key)

    def add(self, key, amount):
        """Each byte of the file counts. A lock would stay with a rank that is stopped while it holds it."""
        file = os.open(self._path(key), os.O_CREAT | os.O_RDWR | os.O_APPEND)
        try:
            os.write(file, b"+" * amount)
            return os.lseek(file, 0, os.SEEK_CUR if amount else os.SEEK_END)
        finally:
            os.close(file)
