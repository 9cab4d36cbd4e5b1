"""Completes the docstrings of a class's methods: ``help`` shows all arguments and errors, and each is written once.

``Ibcast`` says "Start :meth:`Bcast`, with its arguments": :func:`forms` adds the arguments and errors of ``Bcast``.
:func:`described` adds arguments and errors that many methods of a class share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import cleandoc
from types import FunctionType
from typing import TypeVar

_T = TypeVar("_T", bound=type)

#: The beginning of a form's docstring, with the method that it is a form of.
_FORM = re.compile(r"[^:]*:meth:`(\w+)`, with its arguments")
_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.M)
#: Words of a form's first line -> its ``Returns``.
_RETURNS = {
    "return its request": "Request: ``Wait`` and ``Test`` tell its end, and raise. Buffers are the call's until then.",
    "started many times": "PersistentRequest: ``Start`` makes the call, and ``Wait`` tells its end.",
}
#: Arguments that only forms have.
_ALSO = {"info": "info: Taken as mpi4py takes it, and not used."}


def forms(kind: _T) -> _T:
    """Class decorator: ``help`` of a method whose docstring names another one ("Start :meth:`Bcast`, with its
    arguments") shows that one's arguments and errors, too."""
    for function in _documented(kind):
        if found := _FORM.match(function.__doc__ or ""):
            other = getattr(kind, found[1])
            function.__doc__ = _joined(function, _parts(function), _parts(getattr(other, "__func__", other)))
    return kind


def described(*, raises: str, **arguments: str) -> Callable[[_T], _T]:
    """Class decorator that adds ``arguments`` that methods take and do not describe to their docstrings, and the errors
    of those that take arguments and name none. It stands below :func:`forms`."""

    def complete(kind: _T) -> _T:
        for function in _documented(kind):
            if function not in vars(kind).values() or _FORM.match(function.__doc__ or ""):  # class methods; forms
                continue
            own, takes = _parts(function), _takes(function)
            entries = _entries(own)
            known = {name for each in entries for name in _names(each)}
            entries += [
                f"    {name}: {text}" for name, text in arguments.items() if name in takes and name not in known
            ]
            if entries:
                entries.sort(key=lambda each: next((takes.index(name) for name in _names(each) if name in takes), 99))
                own = {"Raises": f"    {raises}"} | own | {"Args": "\n".join(entries)}
            function.__doc__ = _text(own)
        return kind

    return complete


def _documented(kind: type) -> Iterator[FunctionType]:
    """The functions of a class that have docstrings."""
    for member in list(vars(kind).values()):
        function = getattr(member, "__func__", member)
        if isinstance(function, FunctionType) and function.__doc__:
            yield function


def _takes(function: FunctionType) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _parts(function: FunctionType) -> dict[str, str]:
    """The text of a docstring and its sections, by name; the text has none."""
    text, *rest = _SECTION.split(cleandoc(function.__doc__ or ""))
    return {"": text, **dict(zip(rest[::2], rest[1::2], strict=True))}


def _entries(parts: dict[str, str]) -> list[str]:
    """The entries of the arguments of a docstring."""
    return re.split(r"\n(?=    \w)", args) if (args := parts.get("Args", "").strip("\n")) else []


def _names(entry: str) -> list[str]:
    """The arguments that an entry describes."""
    return entry.partition(":")[0].replace(",", " ").split()


def _joined(function: FunctionType, own: dict[str, str], other: dict[str, str]) -> str:
    """The docstring of a form: its own text and sections, and in their place those of the method that it is of."""
    takes = _takes(function)
    kept = [each for each in _entries(other) if any(name in takes for name in _names(each))]
    kept += [f"    {text}" for name, text in _ALSO.items() if name in takes]
    returns = next((f"    {text}" for words, text in _RETURNS.items() if words in own[""]), "")
    return _text({**other, "Args": "\n".join(kept), "Returns": returns, **own})


def _text(sections: dict[str, str]) -> str:
    names = [name for name in ("Args", "Returns", "Raises") if sections.get(name)]
    return "\n\n".join([sections[""].strip(), *(name + ":\n" + sections[name].strip("\n") for name in names)])
