"""A config against the table of keys: every key known, every value of its kind, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zerofold.config.errors import ConfigError, shown, unknown, wrong
from zerofold.config.keys import Key, Note, Old, Refused, Section
from zerofold.config.kinds import AUTO, Kind, Mismatch


@dataclass
class Checked:
    """Values by dotted path, defaults filled in; "auto" still stands where it was given and is allowed."""

    values: dict[str, Any]
    defaults: Mapping[str, Any]
    table: Section
    given: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)

    def __getitem__(self, path: str) -> Any:
        return self.values[path]

    def is_auto(self, path: str) -> bool:
        return bool(self.values[path] == AUTO)

    def settle(self, path: str, value: Any, text: str) -> None:
        """Replaces an "auto", and says by what and why."""
        self.values[path] = value
        self.notes.append(Note(path, AUTO, "honoured", f"{shown(value)}, {text}"))

    def map(self, path: str, text: str) -> None:
        self.notes.append(Note(path, self.values[path], "mapped", text))

    def section(self, path: str) -> dict[str, Any]:
        """The values of the keys directly in a section, by their names."""
        start = f"{path}."
        found = {key.removeprefix(start): value for key, value in self.values.items() if key.startswith(start)}
        return {key: value for key, value in found.items() if "." not in key}


def check(config: Mapping[str, Any], table: Section) -> Checked:
    """Raises a ConfigError at the first thing that is not as the table wants it."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"the config is {shown(config)}; give a dict, a path to a JSON file or JSON text")
    defaults = dict(_defaults(table, ""))
    checked = Checked(dict(defaults), defaults, table)
    _check_section(config, table, "", checked)
    return checked


def _defaults(section: Section, path: str) -> Iterator[tuple[str, Any]]:
    for name, spec in section.keys.items():
        here = _join(path, name)
        if isinstance(spec, Key):
            yield here, spec.default
        elif isinstance(spec, Section):
            yield from _defaults(spec, here)


def _check_section(section: Mapping[str, Any], table: Section, path: str, checked: Checked) -> None:
    for name, value in section.items():
        here = _join(path, str(name))
        spec = table.keys.get(name)
        if not path and _is_loose_size(str(name), table):
            text = "nothing, as with DeepSpeed, which looks for it in its section"
            checked.notes.append(Note(here, value, "mapped", text))
            continue
        if spec is None:
            raise unknown(here, str(name), value, table.keys, meant=_elsewhere(str(name), checked.table))
        if isinstance(spec, Refused):
            if not spec.is_off(value):
                raise ConfigError(f"{here}: {shown(value)} is refused: {spec.why}")
        elif isinstance(spec, Section):
            _check_subsection(value, spec, here, checked)
        elif isinstance(spec, Old):
            _take_old(value, spec, here, checked)
        else:
            _take(value, spec, here, checked)


def _is_loose_size(name: str, table: Section) -> bool:
    """One of ZeRO's sizes by its path in one name, as TRL writes them beside the section. Nothing depends on these."""
    section, _, key = name.partition(".")
    zero = table.keys.get(section)
    spec = zero.keys.get(key) if section == "zero_optimization" and isinstance(zero, Section) else None
    return isinstance(spec, Key) and spec.auto


def _check_subsection(value: Any, table: Section, path: str, checked: Checked) -> None:
    if value is None:
        return
    if isinstance(value, bool) and table.short is not None:
        checked.notes.append(Note(path, value, "mapped", f"an old form of {shown(table.short(value))}"))
        value = table.short(value)
    if not isinstance(value, Mapping):
        raise wrong(path, value, f"write {table.example}", why="is no section")
    checked.given.add(path)
    _check_section(value, table, path, checked)


def _take(value: Any, spec: Key, path: str, checked: Checked) -> None:
    if value is None and spec.default is None:
        return
    if value == AUTO and isinstance(value, str):
        # A kind may have its own use of the word.
        if not spec.auto and not _fits(value, spec.kind):
            raise wrong(path, value, f"give {spec.kind.words}", why="cannot be found by itself")
        taken = value
    else:
        taken = take(value, spec.kind, path)
    _put(path, taken, checked)
    if spec.mapped and taken not in spec.silent:
        checked.map(path, spec.mapped)


def _take_old(value: Any, spec: Old, path: str, checked: Checked) -> None:
    if value is None:
        return
    new = value if value == AUTO else spec.turn(take(value, spec.kind, path))
    if spec.new in checked.given and checked[spec.new] != new:
        raise _contradiction(path, value, spec.new, checked)
    _put(spec.new, new, checked)
    checked.notes.append(Note(path, value, "mapped", f"an old name of {spec.new}"))


def _put(path: str, value: Any, checked: Checked) -> None:
    if path in checked.given and checked[path] != value:  # by its old name
        raise _contradiction(path, value, path, checked)
    checked.given.add(path)
    checked.values[path] = value


def _contradiction(path: str, value: Any, other: str, checked: Checked) -> ConfigError:
    against = "its old name" if path == other else other
    return wrong(path, value, "keep one of the two", why=f"contradicts {against}, which says {shown(checked[other])}")


def _elsewhere(name: str, table: Section) -> str | None:
    """Where the key is at home, if there is one such place."""
    found = [path for path in _paths(table, "") if path.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else None


def _paths(section: Section, path: str) -> Iterator[str]:
    for name, spec in section.keys.items():
        yield _join(path, name)
        if isinstance(spec, Section):
            yield from _paths(spec, _join(path, name))


def take(value: Any, kind: Kind, path: str) -> Any:
    """The value as the code wants it."""
    try:
        return kind.take(value)
    except Mismatch as mismatch:
        hint = f" ({mismatch})" if str(mismatch) else ""
        raise wrong(path, value, f"give {kind.words}{hint}") from None


def _fits(value: Any, kind: Kind) -> bool:
    try:
        kind.take(value)
    except Mismatch:
        return False
    return True


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
