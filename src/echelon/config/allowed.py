"""Which code outside of Echelon may this process import because a text names it?

Texts name code in three ways: `function(target="module:name")`, a strategy of another distribution, and an
optimizer of the user's for a parameter server. Texts also come from elsewhere: a recorded run's folder, a
plan's file, a message from a worker. So such a name is imported only if the user of this process gave it:
on the command line, in echelon.toml, as an argument of `join` or `launch`, with `echelon --allow NAME`, or
in the variable ECHELON_ALLOW, which is how `--allow` reaches workers and servers. What a run's own workers
read in the plan that their launcher wrote is given too: the launcher has refused what was not.
"""

from __future__ import annotations

import os
import re

from echelon.errors import ConfigError

ALLOW_VARIABLE = "ECHELON_ALLOW"
_WORD = re.compile(r"[\w.:-]+")
_given: set[str] = set()


def allow_names_in(*texts: object) -> None:
    """From now on, code may be imported that is named in one of these texts of the user's.

    `module:name` counts only as an argument of a strategy, as in `function(module:name)`: elsewhere it is
    the name of a run or a folder, an address or a time.
    """
    for text in texts:
        if isinstance(text, str):
            name, _, arguments = text.partition("(")
            _given.update(word for word in _WORD.findall(name) if ":" not in word)
            _given.update(_WORD.findall(arguments))


def is_allowed(name: str) -> bool:
    """Whether the user of this process named it."""
    return name in _given or name in _WORD.findall(os.environ.get(ALLOW_VARIABLE, ""))


def check_allowed(name: str, what: str, *, where: str) -> None:
    """Refuse to import code that the user of this process did not name."""
    if not is_allowed(name):
        raise ConfigError(
            f"{what} is code outside of Echelon that a file or another process names; it is not imported",
            where=where,
            fix=f"if you trust that code, name it yourself: echelon --allow {name} ..., "
            f"or {ALLOW_VARIABLE}={name}",
        )
