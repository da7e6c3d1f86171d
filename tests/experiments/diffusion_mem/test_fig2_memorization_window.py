"""The verdict rule on curves whose law is known, and the figure's panels on awkward ones."""

import csv

import numpy as np
import pytest
from etils import epath

from common.verdict import Verdict
from experiments.diffusion_mem import fig2_memorization_window as fig2
from experiments.runs import Run

SIZES = (32, 64, 128, 256)
REPRODUCED, TREND, NOT = Verdict.REPRODUCED, Verdict.TREND_ONLY, Verdict.NOT_REPRODUCED


def runs_of(
    tau_mem, tau_gen=lambda n: 100.0, gap=None, sizes=SIZES, seeds=5, end=1e5, points=240, folder="."
):
    """Runs in which each time is the given function of n, but for 1 % of noise over seeds."""
    steps = np.unique(np.geomspace(1, end, points).astype(int))
    return [_run(n, steps, tau_mem(n), tau_gen(n), (gap or tau_mem)(n), seeds, folder) for n in sizes]


def _run(n, steps, tau_mem, tau_gen, gap, seeds, folder):
    factor = np.exp(np.random.default_rng(n).normal(0, 0.01, seeds))
    rows = []
    for step in steps:
        row = {
            "sample/frechet": 10 * 0.1 ** np.minimum(step / (tau_gen * factor), 3.0) + 1,
            "sample/memorized": np.clip(0.05 * (step / (tau_mem * factor)) ** 2, 0, 1),
            "loss/train": np.full(seeds, 0.1),
            "loss/test": 0.1 + 0.1 * (step / (gap * factor)) ** 2,
        }
        rows.append(
            {"step": int(step)} | {name: (v if seeds > 1 else v[:1]).tolist() for name, v in row.items()}
        )
    config = fig2.get_config("cpu", n)
    config.run.num_seeds = seeds
    return Run(f"n={n}", epath.Path(folder), config.lock(), rows, True)


def verdicts(runs):
    return [claim.verdict for claim in fig2.CLAIM(runs)]


def test_times_are_those_the_curves_were_made_of():
    run = runs_of(lambda n: 10.0 * n)[1]
    factor = np.exp(np.random.default_rng(64).normal(0, 0.01, 5))
    np.testing.assert_allclose(fig2.memorization_time(run), 640 * factor, rtol=0.02)
    np.testing.assert_allclose(fig2.loss_gap_time(run), 640 * factor, rtol=0.02)
    np.testing.assert_allclose(fig2.generalisation_time(run), -100 * factor * np.log10(0.1), rtol=0.05)


def test_quality_has_arrived_only_when_it_stays():
    """A single milestone that jumps up does not count, a relapse does."""
    run = runs_of(lambda n: 10.0 * n)[1]
    steps, _ = run.series("sample/frechet")
    before = fig2.generalisation_time(run)
    run.rows[np.searchsorted(steps, 1000)]["sample/frechet"] = [9.0] * 5
    np.testing.assert_allclose(fig2.generalisation_time(run), before)
    for i in range(3):
        run.rows[np.searchsorted(steps, 3000) + i]["sample/frechet"] = [9.0] * 5
    np.testing.assert_allclose(fig2.generalisation_time(run), 3300, rtol=0.1)
    run.rows[-1]["sample/frechet"] = run.rows[-2]["sample/frechet"] = [9.0] * 5
    assert np.isnan(fig2.generalisation_time(run)).all()


def test_exact_law_is_reproduced():
    claims = fig2.CLAIM(runs_of(lambda n: 20.0 * n))
    assert [claim.verdict for claim in claims] == [REPRODUCED] * 4
    assert claims[0].measured == pytest.approx(1, abs=0.03)
    assert claims[0].interval[0] < claims[0].measured < claims[0].interval[1]
    assert claims[1].measured == pytest.approx(0, abs=0.03)
    assert all(claim.seeds == 5 for claim in claims)


def test_square_root_law_is_a_trend_only():
    claims = fig2.CLAIM(runs_of(lambda n: 300.0 * n**0.5))
    assert claims[0].measured == pytest.approx(0.5, abs=0.03)
    assert [claim.verdict for claim in claims] == [TREND, REPRODUCED, TREND, REPRODUCED]


def test_quadratic_law_is_a_trend_only():
    assert verdicts(runs_of(lambda n: 0.2 * n**2))[0] == TREND


def test_times_that_do_not_grow_are_not_reproduced():
    """The noise may leave an interval on either side of zero; a fall does not."""
    claims = fig2.CLAIM(runs_of(lambda n: 1000.0 * n**-0.1))
    assert [claim.verdict for claim in claims[:3]] == [NOT, REPRODUCED, NOT]


def test_quality_that_waits_for_n_as_memorization_does_is_not_flat():
    claims = fig2.CLAIM(runs_of(lambda n: 20.0 * n, tau_gen=lambda n: 4.0 * n))
    assert claims[1].measured > 0.8
    assert claims[1].verdict == NOT
    half = fig2.CLAIM(runs_of(lambda n: 20.0 * n, tau_gen=lambda n: 20.0 * n**0.4))
    assert half[1].verdict == TREND


@pytest.mark.parametrize(("ratio", "verdict"), [(8, REPRODUCED), (2, TREND), (0.5, NOT)])
def test_window_needs_memorization_well_after_quality(ratio, verdict):
    tau_gen = 400  # when 90 % of the fall of 10 · 0.1^(τ / 400) is behind
    claims = fig2.CLAIM(runs_of(lambda n: ratio * tau_gen * n / 256, tau_gen=lambda n: tau_gen))
    assert claims[3].verdict == verdict
    assert claims[3].measured == pytest.approx(ratio, rel=0.05)


def test_runs_that_never_memorize_are_counted_and_forbid_the_full_verdict():
    claims = fig2.CLAIM(runs_of(lambda n: 20.0 * n, end=2000))  # n = 128 and 256 end before 20 n
    assert claims[0].measured == pytest.approx(1, abs=0.1)
    assert claims[0].verdict == TREND
    assert "10 of 20 seeds never got there" in claims[0].statement
    assert claims[3].measured == "never memorized"
    assert claims[3].verdict == REPRODUCED  # the window is longer than the run


def test_nothing_ever_memorized():
    claims = fig2.CLAIM(runs_of(lambda n: 1e9 * n))
    assert [claim.verdict for claim in claims] == [NOT, REPRODUCED, NOT, REPRODUCED]
    assert np.isnan(claims[0].measured)
    assert "20 of 20 seeds" in claims[0].statement


def test_one_seed_has_no_interval_and_the_verdicts_its_values_give():
    claims = fig2.CLAIM(runs_of(lambda n: 20.0 * n, seeds=1))
    assert [claim.verdict for claim in claims] == [REPRODUCED] * 4
    assert np.isnan(claims[0].interval).all()


def test_diverged_seed_is_not_a_reproduction():
    runs = runs_of(lambda n: 20.0 * n)
    for row in runs[0].rows:
        for name in row.keys() - {"step"}:
            row[name][2] = float("nan")
    assert verdicts(runs) == [TREND, TREND, TREND, REPRODUCED]
    for row in runs[-1].rows:
        for name in row.keys() - {"step"}:
            row[name][2] = float("nan")
    assert verdicts(runs)[3] == NOT


def _with_artifacts(folder, **kwargs):
    runs = runs_of(points=30, folder=folder, **kwargs)
    (folder / "artifacts").mkdir()
    seeds = runs[0].num_seeds
    images = np.random.default_rng(0).uniform(-1, 1, (seeds, 8, 8, 8, 1))
    for row in runs[0].rows:
        arrays = (
            {"samples": images, "nearest": images}
            if seeds > 1
            else {"samples": images[0], "nearest": images[0]}
        )
        np.savez(folder / "artifacts" / f"sample_{row['step']}.npz", **arrays)
    return runs


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tau_mem": lambda n: 20.0 * n},
        {"tau_mem": lambda n: 20.0 * n, "seeds": 1},
        {"tau_mem": lambda n: 1e9, "tau_gen": lambda n: 1e9, "sizes": (64,)},
    ],
    ids=["law", "one seed", "one size, nothing happens"],
)
def test_panels_are_drawn_with_their_numbers(kwargs, tmp_path):
    drawn = fig2.plot(_with_artifacts(tmp_path, **kwargs), tmp_path / "figures")
    assert [image.stem for image, _ in drawn] == ["curves", "times", "gallery"]
    for image, caption in drawn:
        assert image.stat().st_size > 1000
        assert caption.endswith(".")
        assert image.with_suffix(".svg").exists()
    sizes, seeds = kwargs.get("sizes", SIZES), kwargs.get("seeds", 5)
    with (tmp_path / "figures" / "times.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(sizes) * seeds
    times = [
        float(row["step"]) for row in rows if "memorized" in row["time"] and row["n"] in ("128", "128.0")
    ]
    if len(sizes) > 1:
        np.testing.assert_allclose(times, 2560, rtol=0.05)


def test_panels_of_a_seed_that_diverged_from_the_start(tmp_path):
    runs = _with_artifacts(tmp_path, tau_mem=lambda n: 20.0 * n)
    for run in runs:
        for row in run.rows:
            for name in row.keys() - {"step"}:
                row[name] = [float("nan")] * 5
    assert len(fig2.plot(runs, tmp_path / "figures")) == 3
    assert set(verdicts(runs)) == {NOT}
