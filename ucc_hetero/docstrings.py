"""Docstrings of methods that are another method in another form: they get that one's arguments and errors."""

from __future__ import annotations

import re
from inspect import cleandoc
from types import FunctionType
from typing import TypeVar

_T = TypeVar("_T", bound=type)

#: What such a docstring begins with: the method that it is a form of.
_FORM = re.compile(r"[^:]*:meth:`(\w+)`, with its arguments")
_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.M)
#: Words of the first line -> what is returned.
_RETURNS = {
    "return its request": "Request: ``Wait`` and ``Test`` tell its end, and raise. Buffers are the call's until then.",
    "started many times": "PersistentRequest: ``Start`` makes the call, and ``Wait`` tells its end.",
}
#: Arguments that forms have beside.
_ALSO = {"info": "info: Taken as mpi4py takes it, and not used."}


def forms(kind: _T) -> _T:
    """Class decorator: ``help`` of a method whose docstring names another one ("Start :meth:`Bcast`, with its
    arguments") shows that one's arguments and errors, too.

    Args:
        kind: A class with both methods.

    Returns:
        The class.
    """
    for member in list(vars(kind).values()):
        function = getattr(member, "__func__", member)
        if isinstance(function, FunctionType) and function.__doc__ and (found := _FORM.match(function.__doc__)):
            other = getattr(kind, found[1])
            function.__doc__ = _joined(function, _parts(function), _parts(getattr(other, "__func__", other)))
    return kind


def _parts(function: FunctionType) -> dict[str, str]:
    """The text of a docstring and its sections, by name; the text has none."""
    text, *rest = _SECTION.split(cleandoc(function.__doc__ or ""))
    return {"": text, **dict(zip(rest[::2], rest[1::2], strict=True))}


def _joined(function: FunctionType, own: dict[str, str], other: dict[str, str]) -> str:
    """The docstring of a form: its own text and sections, and in their place those of the method that it is of."""
    code = function.__code__
    takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    entries = re.split(r"\n(?=    \w)", other.get("Args", "").strip("\n"))
    kept = [each for each in entries if any(name in takes for name in each.partition(":")[0].replace(",", " ").split())]
    kept += [f"    {text}" for name, text in _ALSO.items() if name in takes]
    returns = next((f"    {text}" for words, text in _RETURNS.items() if words in own[""]), "")
    sections = {**other, "Args": "\n".join(kept), "Returns": returns, **own}
    names = [name for name in ("Args", "Returns", "Raises") if sections.get(name)]
    return "\n\n".join([own[""].strip(), *(name + ":\n" + sections[name].strip("\n") for name in names)])
