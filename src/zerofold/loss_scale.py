"""By what the loss is multiplied so that small gradients survive fp16, and when that number moves. No tensors here.

scale  |        ,---------,                 after `window` steps without an overflow: twice as much
       |--------'         '--x              an overflow, once `hysteresis` is used up: half as much
       |                     '--x   ,----   and the step is skipped each time
       |________________________'---'____   never below `minimum`; `patience` overflows in a row there end it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_FACTOR = 2.0
_LARGEST_POWER = 127  # of two, in fp32: the loss is multiplied in it


class LossScaleError(RuntimeError):
    """Training cannot go on: gradients stay infinite or NaN whatever the loss is multiplied by.

    >>> scaler = LossScaler(LossScale(static=1.0, patience=1))
    >>> scaler.update(overflow=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    zerofold.loss_scale.LossScaleError: 1 steps in a row had infinite or NaN gradients with no loss scaling...
    """


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss is scaled. The defaults, and what each number means, are DeepSpeed's.

    >>> LossScale().first, LossScale(static=128).first
    (65536.0, 128.0)
    """

    static: float | None = None
    """A scale that never moves; of the rest only `patience` then counts. 1.0 is no scaling, for bf16 and fp32."""
    initial_power: int = 16
    """The first scale is two to this power."""
    window: int = 1000
    """Steps without an overflow after which the scale doubles. The first after an overflow does not count."""
    hysteresis: int = 2
    """The overflow that halves the scale: the ones before it only skip their step. Full again when it doubles."""
    consecutive_hysteresis: bool = False
    """Whether every step without an overflow makes the hysteresis full again."""
    minimum: float = 1.0
    """The scale does not go below."""
    patience: int = 20
    """Skipped steps in a row, with a scale that cannot go lower, that end training."""

    def __post_init__(self) -> None:
        if self.static is not None:
            _check_positive("static", self.static, "leave it out for a scale that moves by itself, 1.0 for none")
        _check_whole("initial_power", self.initial_power, 0, "16 is usual")
        if self.initial_power > _LARGEST_POWER:
            raise ValueError(
                f"initial_power={self.initial_power}: fp32 ends before 2**{_LARGEST_POWER + 1}; 16 is usual"
            )
        _check_whole("window", self.window, 1, "1000 is usual")
        _check_whole("hysteresis", self.hysteresis, 1, "1 halves the scale at every overflow")
        if not isinstance(self.consecutive_hysteresis, bool):
            raise TypeError(f"consecutive_hysteresis={self.consecutive_hysteresis!r} must be True or False")
        _check_positive("minimum", self.minimum, "1.0 is usual")
        _check_whole("patience", self.patience, 1, "1 stops at the first overflow that a smaller scale cannot cure")
        if self.static is None and self.first < self.minimum:
            raise ValueError(
                f"minimum={self.minimum} is above the first scale, 2**{self.initial_power}: lower minimum or raise "
                "initial_power"
            )

    @property
    def first(self) -> float:
        """The scale of the first step."""
        return _FACTOR**self.initial_power if self.static is None else float(self.static)


class LossScaler:
    """The scale as training goes on. All ranks must be told the same, so that all have the same scale.

    >>> scaler = LossScaler(LossScale(initial_power=3, hysteresis=1, window=2))
    >>> for overflow in (True, False, False, False):
    ...     scaler.update(overflow)
    ...     print(scaler.value)
    4.0
    4.0
    4.0
    8.0
    >>> scaler.skipped
    1
    """

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.skipped = 0
        self.skipped_in_a_row_at_minimum = 0
        self._value = settings.first
        self._tolerated = settings.hysteresis - 1  # overflows that the scale still stands
        self._clean = 0  # steps since the last overflow, or since the start

    @property
    def value(self) -> float:
        """What the next loss is to be multiplied by, and its gradients divided by."""
        return self._value

    @property
    def is_at_minimum(self) -> bool:
        """Whether an overflow now would leave nothing to lower."""
        return self.settings.static is not None or self._value <= self.settings.minimum

    def update(self, overflow: bool, *, parameter: str | None = None) -> None:
        """Takes in whether the step's gradients were infinite or NaN anywhere; if so, the caller skips the step.

        `parameter` names one that had such a gradient, for the message of the LossScaleError that ends training.
        """
        if overflow:
            self.skipped += 1
            self.skipped_in_a_row_at_minimum += self.is_at_minimum
            self._clean = 0
            if self._tolerated:
                self._tolerated -= 1
            elif self.settings.static is None:
                self._value = max(self._value / _FACTOR, self.settings.minimum)
            if self.skipped_in_a_row_at_minimum >= self.settings.patience:
                raise LossScaleError(self._why_it_ends(parameter))
            return
        self.skipped_in_a_row_at_minimum = 0
        # A window is counted from the step after the first clean one, as DeepSpeed does: the first lasts one longer.
        grows = self.settings.static is None and self._clean > 0 and self._clean % self.settings.window == 0
        if grows:
            self._value *= _FACTOR
        if grows or self.settings.consecutive_hysteresis:
            self._tolerated = self.settings.hysteresis - 1
        self._clean += 1

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, from which another scaler goes on as this one would."""
        return {
            "value": self._value,
            "tolerated": self._tolerated,
            "clean": self._clean,
            "skipped": self.skipped,
            "skipped_in_a_row_at_minimum": self.skipped_in_a_row_at_minimum,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Settings are not part of the state: what they rule out (another static scale, a lower one) gives way.

        >>> scaler = LossScaler(LossScale(static=8.0))
        >>> scaler.load_state_dict(LossScaler(LossScale()).state_dict())
        >>> scaler.value
        8.0
        """
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise ValueError(f"the state of a loss scaler has no {', '.join(missing)}: pass what state_dict() gave")
        if self.settings.static is None:
            self._value = max(float(state["value"]), float(self.settings.minimum))
        self._tolerated = min(int(state["tolerated"]), self.settings.hysteresis - 1)
        self._clean = int(state["clean"])
        self.skipped = int(state["skipped"])
        self.skipped_in_a_row_at_minimum = int(state["skipped_in_a_row_at_minimum"])

    def _why_it_ends(self, parameter: str | None) -> str:
        static = self.settings.static
        if static is None:
            scale = f"a loss scale of {self._value:g}, the smallest allowed,"
        else:
            scale = "no loss scaling" if static == 1 else f"a fixed loss scale of {static:g}"
        smaller = "a smaller loss scale, or one that moves by itself (static=None); " if (static or 0) > 1 else ""
        where = f"'{parameter}'" if parameter else "the parameters with such gradients"
        return (
            f"{self.skipped_in_a_row_at_minimum} steps in a row had infinite or NaN gradients with {scale} and were "
            f"skipped, so the model no longer trains: most often it has diverged. Try {smaller}a lower learning rate, "
            "a warm-up or clipping; bf16 where fp16 is used, since its range is that of fp32; and look at "
            f"{where} and at the data of these steps"
        )


def _check_whole(name: str, number: int, least: int, hint: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name}={number!r} must be a whole number; {hint}")
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}; {hint}")


def _check_positive(name: str, number: float, hint: str) -> None:
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise TypeError(f"{name}={number!r} must be a number; {hint}")
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={number} must be positive and finite; {hint}")
