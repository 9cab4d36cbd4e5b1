"""``python -m ucc_hetero``: prints versions, settings, plans and topology, and tunes algorithms."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from . import env
from ._version import __version__
from .cli.commands import add as add_commands
from .closed_pipe import ends_with_its_reader
from .errors import UCCHError

_DESCRIPTION = "Print what is installed, settings, plans and topology, and tune the choice of plans."


def _info(args: argparse.Namespace) -> int:
    from .cli.info import collect, render

    facts = collect()
    print(json.dumps(facts, indent=2) if args.json else render(facts))
    return 0


def _env(args: argparse.Namespace) -> int:
    print(env.describe())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ucc_hetero", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"ucc_hetero {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    text = "print versions, paths, transports, components, memory types and MPI"
    info = commands.add_parser("info", help=text, description=f"{text[0].upper()}{text[1:]}.")
    info.add_argument("--json", action="store_true", help="as JSON")
    info.set_defaults(run=_info)
    text = "print every environment variable with its default and meaning"
    commands.add_parser("env", help=text, description=f"{text[0].upper()}{text[1:]}.").set_defaults(run=_env)
    add_commands(commands)
    return parser


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (UCCHError, ValueError) as error:
        text = str(error)
    except OSError as error:
        if error.filename is None:  # the error is not about a file of the command line
            raise
        text = f"{error.filename}: {error.strerror}"
    print(f"ucc_hetero: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
