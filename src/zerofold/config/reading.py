"""A config from wherever it is: a file, a dict, JSON text, or base64 of it; with comments and trailing commas."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from zerofold.config.errors import ConfigError, shown

_WIDEST = 60  # characters of a line that a message shows


def read(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The config as a dict that is the caller's own.

    `//`, `#` and `/* */` comments and trailing commas are allowed; a key that is given twice is not.

    >>> read('{"fp16": {"enabled": true}, // half of the bytes' + chr(10) + '}')
    {'fp16': {'enabled': True}}
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"the config is {shown(config)}; give a path to a JSON file, a dict or JSON text")
    text = os.fspath(config)
    if isinstance(config, str) and "{" in text:
        return _parse(text, "the config")
    path = Path(text)
    if os.path.isfile(text):  # unlike Path.is_file, it takes base64 that is too long for a name
        try:
            return _parse(path.read_text(encoding="utf-8-sig"), text)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{text}: byte {error.start} is not UTF-8; save the file as UTF-8 JSON") from None
    decoded = _from_base64(text)
    if decoded is not None:
        return _parse(decoded, "the config (base64)")
    if os.path.isdir(text):
        raise ConfigError(f"{text} is a folder; give the path of the JSON file in it")
    raise ConfigError(f"{shown(text)} is no file from {os.getcwd()}; give the path of a JSON file, a dict or JSON text")


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
    return decoded if "{" in decoded else None


def _parse(text: str, where: str) -> dict[str, Any]:
    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for key, value in pairs:
            if key in section:
                raise ConfigError(
                    f"{where}: the key {shown(key)} is given twice in one section, as {shown(section[key])} and as "
                    f"{shown(value)}; keep one of them"
                )
            section[key] = value
        return section

    try:
        parsed = json.loads(_plain(text, where), object_pairs_hook=refuse_twice)
    except json.JSONDecodeError as error:
        _refuse_text(text, error.pos, where, _reason(error, text))
    if not isinstance(parsed, dict):
        raise ConfigError(f'{where} holds {shown(parsed)}, not a section; write {{"train_batch_size": 32, ...}}')
    return parsed


def _reason(error: json.JSONDecodeError, text: str) -> str:
    reason = error.msg[0].lower() + error.msg[1:]
    if text[error.pos : error.pos + 4] in ("True", "None") or text[error.pos : error.pos + 5] == "False":
        return f"{reason}: JSON writes true, false and null"
    return reason


def _refuse_text(text: str, position: int, where: str, reason: str) -> NoReturn:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    found = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
    found = found if len(found) <= _WIDEST else found[: _WIDEST - 3] + "..."
    raise ConfigError(f"{where}, line {line}, column {column}: this is not JSON, {reason}; mend {shown(found)}")


def _plain(text: str, where: str) -> str:
    """Plain JSON of the same length: comments and trailing commas become blanks, so that positions stay true."""
    out = list(text)
    comma: int | None = None  # the last one, as long as nothing but blanks and comments followed
    at = 0
    while at < len(text):
        end = _comment_end(text, at, where)
        if end > at:
            out[at:end] = [char if char == "\n" else " " for char in text[at:end]]
            at = end
            continue
        char = text[at]
        if char == '"':
            at = _string_end(text, at)
            comma = None
            continue
        if char in "}]" and comma is not None:
            out[comma] = " "
        if not char.isspace():
            comma = at if char == "," else None
        at += 1
    return "".join(out)


def _comment_end(text: str, at: int, where: str) -> int:
    """Where the comment that starts at `at` ends; `at` itself if none does."""
    if text.startswith("//", at) or text[at] == "#":
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    if text.startswith("/*", at):
        end = text.find("*/", at)
        if end < 0:
            _refuse_text(text, at, where, "the comment /* has no end")
        return end + 2
    return at


def _string_end(text: str, at: int) -> int:
    at += 1
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1
