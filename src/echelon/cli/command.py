"""Commands whose help shows no type for a flag, and whose options name code that may be imported."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from echelon.config.allowed import allow_names_in


class PlainCommand(TyperCommand):
    """A command; typer would show `<bool>` after each of its flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read its words. What the user gave to options may name code outside of Echelon.

        Words that stand alone may not: names of scripts, runs and folders, and a script's own arguments.
        """
        rest = super().parse_args(ctx, args)
        options = (ctx.params.get(one.name) for one in self.params if one.param_type_name == "option")
        for value in options:
            allow_names_in(*(value if isinstance(value, (list, tuple)) else [value]))
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, for the parser and for the help."""
        return _without_flag_types(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands, likewise."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its parameters, for the parser and for the help."""
        return _without_flag_types(super().get_params(ctx))


def _without_flag_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
