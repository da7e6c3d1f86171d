"""What a reproduction claims, what it measured, and the verdict."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How a measured value stands to the paper's."""

    REPRODUCED = "reproduced"
    TREND_ONLY = "trend only"
    NOT_REPRODUCED = "not reproduced"
    NOT_RUN = "not run at this scale"


@dataclass(frozen=True)
class Claim:
    """One statement of a paper beside its measurement.

    Attributes:
      statement: what the paper says, in a sentence.
      paper_value: the paper's value as it is to be shown.
      measured: the measured value; None where nothing was run.
      interval: (low, high) of `measured` over seeds; None where there is none.
      seeds: number of seeds behind `measured`.
    """

    statement: str
    paper_value: str
    measured: float | str | None
    interval: tuple[float, float] | None
    seeds: int
    verdict: Verdict


_WORST_FIRST = (Verdict.NOT_REPRODUCED, Verdict.TREND_ONLY, Verdict.REPRODUCED)


def overall(claims: Sequence[Claim]) -> Verdict:
    """The worst verdict among the claims that were run; NOT_RUN where none was."""
    given = {claim.verdict for claim in claims}
    return next((verdict for verdict in _WORST_FIRST if verdict in given), Verdict.NOT_RUN)
