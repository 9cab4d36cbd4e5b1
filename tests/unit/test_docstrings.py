"""``help`` of a method that is another one in another form names its arguments."""

import inspect
from typing import Any

import pytest

from ucc_hetero import Communicator, Message, Request, rma
from ucc_hetero.docstrings import forms


def of(kind: type) -> list[Any]:
    members = [(name, getattr(member, "__func__", member)) for name, member in inspect.getmembers(kind)]
    found = [(name, each) for name, each in members if ", with its arguments" in (getattr(each, "__doc__", "") or "")]
    return [pytest.param(each, id=f"{kind.__name__}.{name}") for name, each in found]


@pytest.mark.parametrize("method", [*of(Communicator), *of(Request), *of(Message), *of(rma.Endpoint), *of(rma.Request)])
def test_every_argument_has_a_line(method: Any) -> None:
    taken = set(inspect.signature(method).parameters) - {"self", "cls"}
    lines = inspect.cleandoc(method.__doc__).partition("Args:\n")[2].partition("\n\n")[0].splitlines()
    named = {name for line in lines for name in line.partition(":")[0].replace(",", " ").split()}
    assert taken <= named


def test_own_sections_stay_and_arguments_that_are_not_taken_go() -> None:
    @forms
    class Pair:
        def whole(self, one: int, two: int) -> int:
            """Do it.

            Args:
                one: The first.
                two: The second,
                    on two lines.

            Returns:
                A number.

            Raises:
                ValueError: Never.
            """
            return one + two

        def half(self, two: int) -> str:
            """Do as :meth:`whole`, with its arguments.

            Returns:
                A text.
            """
            return str(two)

    assert inspect.cleandoc(Pair.half.__doc__ or "") == (
        "Do as :meth:`whole`, with its arguments.\n\nArgs:\n    two: The second,\n        on two lines.\n\n"
        "Returns:\n    A text.\n\nRaises:\n    ValueError: Never."
    )
