"""``help`` of a method that is another one in another form names its arguments."""

import inspect

from ucc_hetero.docstrings import forms


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
