"""When to log, evaluate and save: predicates of the global step, so a resumed run hits the same steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from common.config import ConfigError, require


class When(Protocol):
    """`when(step, total)` for 0 ≤ step ≤ total: pure and cheap; it holds no counter to restore."""

    def __call__(self, step: int, total: int) -> bool: ...


@dataclass(frozen=True)
class Every:
    """Multiples of `n`; step 0 counts as `first` says, the last step fires too where `last` is set."""

    n: int
    first: bool
    last: bool

    def __call__(self, step: int, total: int) -> bool:
        if step == 0:
            return self.first or (self.last and total == 0)
        return step % self.n == 0 or (self.last and step == total)


@dataclass(frozen=True)
class At:
    """A fixed set of steps."""

    steps: frozenset[int]

    def __call__(self, step: int, total: int) -> bool:
        del total
        return step in self.steps


@dataclass(frozen=True)
class AnyOf:
    """True where one of `whens` is."""

    whens: tuple[When, ...]

    def __call__(self, step: int, total: int) -> bool:
        return any(when(step, total) for when in self.whens)


def every(n: int, first: bool = True, last: bool = True) -> Every:
    """Steps 0, n, 2n, … and the last one. ConfigError unless n is a positive integer."""
    _require_step("every(n)", n, minimum=1)
    return Every(n, first, last)


def at(steps: Iterable[int]) -> At:
    """Exactly these steps. ConfigError unless they are non-negative integers."""
    steps = tuple(steps)
    for step in steps:
        _require_step("at(steps)", step, minimum=0)
    return At(frozenset(steps))


def log_spaced(count: int, first: int, total: int) -> At:
    """`count` steps from `first` to `total`, both included, as evenly spaced in log(step) as integers allow.

    Where rounding would repeat a step the next free one is taken, so the number of steps is exact.
    Raises: ConfigError where so many distinct steps do not exist.
    """
    _require_step("log_spaced(first)", first, minimum=1)
    _require_step("log_spaced(total)", total, minimum=first)
    _require_step("log_spaced(count)", count, minimum=1)
    room = total - first + 1
    require(count <= room, "log_spaced(count)", count, f"only {room} steps from {first} to {total}")
    if count == 1:
        return At(frozenset({total}))
    steps = [first]
    for i in range(1, count - 1):
        ideal = round(first * (total / first) ** (i / (count - 1)))
        latest = total - (count - 1 - i)  # leaves one step for each that follows
        steps.append(min(max(ideal, steps[-1] + 1), latest))
    return At(frozenset([*steps, total]))


def never() -> At:
    """No step."""
    return At(frozenset())


def any_of(*whens: When) -> AnyOf:
    """Steps at which one of `whens` fires."""
    return AnyOf(whens)


def _require_step(field: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{field}={value!r}: must be an integer, at least {minimum}")
