"""What is wrong with a command line, said as every other error is: one sentence and what to try."""

from __future__ import annotations

import difflib
import re

import click

from advisor.errors import AdvisorError


def said_plainly(error: click.UsageError) -> AdvisorError:
    """A fault that click found, in this package's words."""
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error)
    if isinstance(error, click.MissingParameter):
        return AdvisorError(f"{_name(error.param)} is missing.", hint=_synopsis(error))
    if isinstance(error, click.BadParameter):
        return _bad_value(error)
    if isinstance(error, click.BadOptionUsage):
        message = error.format_message()
        if "requires" in message:
            return AdvisorError(f"{error.option_name} is given without its value.", hint=_synopsis(error))
        return AdvisorError(f"{error.option_name} takes no value.", hint=_synopsis(error))
    extra = re.search(r"extra arguments? \((.*)\)", error.format_message())
    if extra:
        return AdvisorError(f"There is an argument too many: {extra[1]}.", hint=_synopsis(error))
    return AdvisorError(error.format_message(), hint=_synopsis(error))


def _no_such_option(error: click.NoSuchOption) -> AdvisorError:
    near = f"Did you mean {error.possibilities[0]}? " if error.possibilities else ""
    name = error.ctx.command_path if error.ctx else "advise"
    takes_more = error.ctx is not None and any(p.name == "script_args" for p in error.ctx.command.params)
    script = " Arguments of the script itself go after --, as in: advise train.py --gpu a100 -- --batch-size 8" if takes_more else ""
    return AdvisorError(f"There is no option {error.option_name}.", hint=f"{near}`{name} --help` lists them.{script}")


def _bad_value(error: click.BadParameter) -> AdvisorError:
    name, kind = _name(error.param), error.param.type if error.param else None
    found = re.match(r"(['\"])(.*?)\1 is not", error.message)
    value = found[2] if found else ""
    if isinstance(kind, click.Choice):
        choices = [str(c) for c in kind.choices]
        near = difflib.get_close_matches(value, choices, n=1)
        return AdvisorError(
            f"{name} is one of {', '.join(choices)}, not {value!r}.", hint=f"Did you mean {near[0]}?" if near else _synopsis(error)
        )
    if found and kind in (click.INT, click.FLOAT):
        return AdvisorError(f"{name} must be a {'whole ' if kind is click.INT else ''}number, not {value!r}.", hint=_synopsis(error))
    return AdvisorError(error.format_message(), hint=_synopsis(error))


def _name(parameter: click.Parameter | None) -> str:
    """A parameter as the user writes it: the long spelling of an option, an argument in capitals."""
    if parameter is None:
        return "A value"
    return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.metavar or str(parameter.name).upper()


def _synopsis(error: click.UsageError) -> str:
    """How the command is written."""
    if error.ctx is None:
        return "`advise --help` explains."
    pieces = " ".join([error.ctx.command_path, *error.ctx.command.collect_usage_pieces(error.ctx)])
    return f"Write `{pieces}`; `{error.ctx.command_path} --help` explains."


def check_command(word: str, known: list[str]) -> None:
    """Refuse what looks like a misspelt command, where the word would else be taken for a script.

    Raises:
        AdvisorError: with the command that was meant.
    """
    near = difflib.get_close_matches(word, [*known, "--version", "--help"], n=1, cutoff=0.75)
    if near and re.fullmatch(r"(--)?[a-z]+", word):
        raise AdvisorError(
            f"There is no {'option' if word[0] == '-' else 'command or file'} {word}.", hint=f"Did you mean `advise {near[0]}`?"
        )
