"""Where commands write their results."""

from __future__ import annotations

from pathlib import Path


def make_folder_of(file: Path | None, option: str = "--out") -> None:
    """Before anything runs: a result that cannot be written would be lost.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "new", "page.html")
    >>> make_folder_of(file); file.parent.is_dir()
    True
    """
    if file is None:
        return
    try:
        file.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {file}: {file.parent} cannot be made ({error.strerror}): name another") from error
    if file.is_dir():
        raise ValueError(f"{option} {file} is a folder: name a file in it")
