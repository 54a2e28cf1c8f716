"""Shared vocabulary: how things are named, written and configured.

call.py      `name(option=value, ...)`: the syntax that names a strategy and its options
registry.py  finds the strategies of one kind by name, ours and third parties'
allowed.py   which code outside of Echelon a text may name: what the user gave himself
named_function.py the user's function that a text names as module:name
toml_text.py reads TOML
units.py     quantities with units: "100mbit", "5ms", "1.5GiB"
every.py     how often: "5min", "500steps", "1epoch"
exit_codes.py exit codes with a meaning of their own
choices.py   the choices that settings, plan and `join` share: types, defaults, help, ranges
schema.py    the settings of a run, each with its default and its help
describe.py  fields of settings classes with their help, for command-line options
resolve.py   default < TOML < command line, and where each value came from
"""
