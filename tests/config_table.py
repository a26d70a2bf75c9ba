"""Every key of a DeepSpeed config and what becomes of it, as docs/config.md.

python -m tests.config_table > docs/config.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from zerofold.config.keys import Key, Old, Refused, Section, Spec
from zerofold.config.keys_training import TABLE

HEAD = """\
# Every key of a ds_config.json
Made by `python -m tests.config_table > docs/config.md`, from the table that the code checks against. An unknown key is
refused with the nearest name. "auto" is accepted where the second column says so.

- **honoured**: does what it says
- **mapped**: has another form here, or no counterpart; said once at the start of a run
- **refused**: cannot be done, unless it is switched off; the message gives the reason
- **old**: an earlier name, read as the new one

Offload: `offload_optimizer` and `offload_param` become `offload=` of `zf.prepare`. The device "cpu" is "host", "nvme" a
file in `nvme_path`; a `ratio` below 1 is the part of the units whose optimizer states go to the host. Parameters are
made from the optimizer's states, so `offload_param` alone takes these along.

| key | "auto" | fate | |
|---|---|---|---|
"""


def rows(section: Section, path: str = "") -> Iterator[str]:
    for name, spec in section.keys.items():
        here = f"{path}{name}"
        if isinstance(spec, Section):
            yield from rows(spec, f"{here}.")
        else:
            yield f"| `{here}` | {'yes' if isinstance(spec, Key) and spec.auto else ''} | {_fate(spec)} |"


def _fate(spec: Spec) -> str:
    if isinstance(spec, Old):
        return f"old | `{spec.new}`"
    if isinstance(spec, Refused):
        return f"refused | {spec.why}"
    assert isinstance(spec, Key)
    return f"mapped | {spec.mapped}" if spec.mapped else f"honoured | {spec.kind.words}"


def page() -> str:
    return HEAD + "\n".join(rows(TABLE)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
