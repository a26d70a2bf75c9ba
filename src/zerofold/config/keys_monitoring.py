"""What is printed, written and measured while training goes on."""

from __future__ import annotations

import math

from zerofold.config.keys import Section, Spec, honoured, mapped, refused_section
from zerofold.config.kinds import FLAG, REAL, TEXT, Kind, Mismatch, choice, list_of, number, whole

JOB_NAME = "DeepSpeedJobName"


def _steps(value: object) -> float:
    """Accelerate writes infinity for "never"."""
    if isinstance(value, float) and value == math.inf:
        return math.inf
    return float(whole(1).take(value))


def _depth(value: object) -> int:
    taken = REAL.take(value)
    if taken != int(taken) or (taken < 0 and taken != -1):
        raise Mismatch
    return int(taken)


_FILES = {
    "enabled": honoured(FLAG, False),
    "output_path": honoured(TEXT, ""),
    "job_name": honoured(TEXT, JOB_NAME),
}

MONITORING: dict[str, Spec] = {
    "steps_per_print": honoured(Kind("a whole number, at least 1; leave it out for never", _steps)),
    "wall_clock_breakdown": honoured(FLAG, False),
    "memory_breakdown": honoured(FLAG, False),
    "dump_state": honoured(FLAG, False),
    "log_level": mapped(
        choice("debug", "info", "warning", "error", "critical"), "there is little to say, and it is always said"
    ),
    "timers": Section(
        {
            "throughput": Section(
                {
                    "enabled": honoured(FLAG, True),
                    "synchronized": mapped(FLAG, "the device is waited for with wall_clock_breakdown only", True),
                }
            )
        },
        example='{"throughput": {"enabled": true}}',
    ),
    "tensorboard": Section(_FILES),
    "csv_monitor": Section(_FILES),
    "wandb": Section(
        {
            "enabled": honoured(FLAG, False),
            "group": honoured(TEXT),
            "team": honoured(TEXT),
            "project": honoured(TEXT, "deepspeed"),
        }
    ),
    "comet": refused_section("there is no Comet writer; use tensorboard, wandb or csv_monitor"),
    "comms_logger": Section(
        {
            "enabled": honoured(FLAG, False),
            "verbose": honoured(FLAG, False),
            "prof_all": honoured(FLAG, True),
            "prof_ops": honoured(list_of(TEXT), ()),
            "debug": mapped(FLAG, "zf.ledger(model).last_calls() shows the last collectives", False, silent=(False,)),
        }
    ),
    "flops_profiler": Section(
        {
            "enabled": honoured(FLAG, False),
            "recompute_fwd_factor": mapped(number(0.0), "recomputed forwards are counted where they run", 0.0),
            "profile_step": honoured(whole(1), 1),
            "module_depth": honoured(Kind("a whole number, -1 for the deepest", _depth), -1),
            "top_modules": honoured(whole(1), 1),
            "detailed": honoured(FLAG, True),
            "output_file": honoured(TEXT),
        }
    ),
}
