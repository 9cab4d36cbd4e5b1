"""Completes the docstrings of a class's methods, so that ``help`` shows all arguments and errors without repetition.

By :func:`forms` methods such as ``Ibcast`` and ``Bcast_init`` need no docstrings, and one such as "Start :meth:`Bcast`,
with its arguments" gets the arguments and errors of ``Bcast``. :func:`described` adds arguments and errors that many
methods of a class share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from inspect import cleandoc
from types import FunctionType
from typing import TypeVar

_T = TypeVar("_T", bound=type)

#: Name of a form -> its docstring, with a place for the name of the method that it is a form of.
_NAMED = (
    (re.compile(r"I(\w+)"), "Start :meth:`{}`, with its arguments; return its request."),
    (
        re.compile(r"(\w+)_init"),
        "Set up :meth:`{}`, with its arguments; return a request that can be started many times.",
    ),
)
#: Beginning of the docstring of a form, with the name of the method that it is a form of.
_FORM = re.compile(r"[^:]*:meth:`(\w+)`, with its arguments")
_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.M)
#: Words in the first line of a form -> its ``Returns``.
_RETURNS = {
    "return its request": "Request: ``Wait`` and ``Test`` raise errors. Leave the buffers alone until it is complete.",
    "started many times": "PersistentRequest: ``Start`` makes the call, and ``Wait`` waits for its end.",
}
#: Arguments that only forms have.
_ALSO = {"info": "info: A hint, ignored."}


def forms(kind: _T) -> _T:
    """Class decorator: a method whose docstring names another one ("Start :meth:`Bcast`, with its arguments") gets that
    method's arguments and errors. Forms without docstrings get theirs by their names."""
    for name, function in vars(kind).items():
        for pattern, text in _NAMED:
            if isinstance(function, FunctionType) and not function.__doc__ and (found := pattern.fullmatch(name)):
                function.__doc__ = text.format(found[1][0].upper() + found[1][1:])
    for function in _documented(kind):
        if found := _FORM.match(function.__doc__ or ""):
            other = getattr(kind, found[1])
            function.__doc__ = _joined(function, _parts(function), _parts(getattr(other, "__func__", other)))
    return kind


def described(*, raises: str, **arguments: str) -> Callable[[_T], _T]:
    """Class decorator: adds ``arguments`` to the docstrings of methods that take but do not describe them, and
    ``raises`` to those with arguments but without errors. It stands below :func:`forms`."""

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
    """The sections of a docstring by name; the text before them has the name ""."""
    text, *rest = _SECTION.split(cleandoc(function.__doc__ or ""))
    return {"": text, **dict(zip(rest[::2], rest[1::2], strict=True))}


def _entries(parts: dict[str, str]) -> list[str]:
    """The entries of the section Args."""
    return re.split(r"\n(?=    \w)", args) if (args := parts.get("Args", "").strip("\n")) else []


def _names(entry: str) -> list[str]:
    """The arguments that an entry describes."""
    return entry.partition(":")[0].replace(",", " ").split()


def _joined(function: FunctionType, own: dict[str, str], other: dict[str, str]) -> str:
    """The docstring of a form: its own text and sections, and the other method's for those that it lacks."""
    takes = _takes(function)
    kept = [each for each in _entries(other) if any(name in takes for name in _names(each))]
    kept += [f"    {text}" for name, text in _ALSO.items() if name in takes]
    returns = next((f"    {text}" for words, text in _RETURNS.items() if words in own[""]), "")
    return _text({**other, "Args": "\n".join(kept), "Returns": returns, **own})


def _text(sections: dict[str, str]) -> str:
    names = [name for name in ("Args", "Returns", "Raises") if sections.get(name)]
    return "\n\n".join([sections[""].strip(), *(name + ":\n" + sections[name].strip("\n") for name in names)])
