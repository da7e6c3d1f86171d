import csv
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest

from common import plotting

PNG = b"\x89PNG\r\n\x1a\n"


def _read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def _example(folder):
    fig, axes = plotting.figure(1, 2)
    ys = np.random.default_rng(0).normal(size=(3, 4))
    data = [plotting.curve(ax, [1, 2, 3, 4], ys + i, f"curve {i}") for i, ax in enumerate(axes.flat)]
    plotting.label(axes[0, 0], "title", x="τ", y="loss")
    plotting.legend(axes[0, 0])
    return plotting.save_figure(fig, folder / "sub" / "fig.v1", plotting.stack(data))


def test_a_figure_is_written_with_its_numbers(tmp_path):
    png, svg, table = _example(tmp_path)
    assert [path.name for path in (png, svg, table)] == ["fig.v1.png", "fig.v1.svg", "fig.v1.csv"]
    assert png.read_bytes().startswith(PNG)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    rows = _read(table)
    assert [row["curve"] for row in rows] == ["curve 0"] * 4 + ["curve 1"] * 4
    ys = np.random.default_rng(0).normal(size=(3, 4))
    assert [float(row["mean"]) for row in rows[:4]] == pytest.approx(ys.mean(0).tolist(), abs=1e-15)
    assert all(float(row["low"]) <= float(row["mean"]) <= float(row["high"]) for row in rows)


def test_the_same_figure_has_the_same_bytes(tmp_path):
    first, second = _example(tmp_path / "a"), _example(tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_figures_leave_no_global_state_and_never_load_pyplot(tmp_path):
    before = dict(matplotlib.rcParams)
    _example(tmp_path)
    assert dict(matplotlib.rcParams) == before
    code = "import sys, common.plotting; sys.exit('matplotlib.pyplot' in sys.modules)"
    root = plotting.__file__.rsplit("/", 2)[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_one_seed_has_a_line_and_no_band():
    _, axes = plotting.figure()
    data = plotting.curve(axes[0, 0], [1, 2], [3.0, 4.0], "one")
    assert data["mean"].tolist() == [3.0, 4.0]
    assert np.isnan(data["low"]).all()
    assert data["seeds"].tolist() == [1, 1]


def test_missing_values_leave_the_mean_and_open_a_gap():
    _, axes = plotting.figure()
    ys = [[1.0, np.nan, np.nan, 4.0], [3.0, 2.0, np.inf, 4.0], [5.0, 4.0, np.nan, 4.0]]
    data = plotting.curve(axes[0, 0], [1, 2, 3, 4], ys, "gaps")
    assert data["mean"][[0, 1, 3]].tolist() == [3.0, 3.0, 4.0]
    assert np.isnan(data["mean"][2])
    assert np.isnan(data["low"][2])
    assert data["low"][[0, 1]].tolist() == [1.0, 2.0]
    assert data["high"][[0, 1]].tolist() == [5.0, 4.0]
    assert data["seeds"].tolist() == [3, 2, 0, 3]


@pytest.mark.parametrize(
    ("x", "ys"), [([], []), ([], np.zeros((3, 0))), ([1], [[1.0], [2.0]]), ([1, 2], [[np.nan] * 2])]
)
def test_degenerate_curves_can_be_saved(tmp_path, x, ys):
    fig, axes = plotting.figure()
    data = plotting.curve(axes[0, 0], x, ys, "few")
    plotting.legend(axes[0, 0])
    assert len(_read(plotting.save_figure(fig, tmp_path / "f", data)[2])) == len(x)


def test_curves_that_do_not_fit_are_refused(tmp_path):
    fig, axes = plotting.figure()
    with pytest.raises(ValueError, match="do not fit"):
        plotting.curve(axes[0, 0], [1, 2, 3], [[1.0, 2.0]], "bad")
    with pytest.raises(ValueError, match="unequal lengths"):
        plotting.save_figure(fig, tmp_path / "f", {"a": [1], "b": []})
    assert not list(tmp_path.iterdir())


def test_csv_numbers_are_exact_and_text_is_quoted(tmp_path):
    value = np.float64(0.1) + np.float64(0.2)
    data = {"x": np.array([value]), "y": [np.float32(0.1)], "text": ['a,"b"\n']}
    row = _read(plotting.save_figure(plotting.figure()[0], tmp_path / "f", data)[2])[0]
    assert float(row["x"]) == value
    assert np.float32(row["y"]) == np.float32(0.1)
    assert row["text"] == 'a,"b"\n'


def test_stack_fills_columns_that_a_table_lacks():
    stacked = plotting.stack([{"a": [1, 2], "b": [3, 4]}, {"a": [5], "c": [6]}])
    assert stacked == {"a": [1, 2, 5], "b": [3, 4, ""], "c": ["", "", 6]}
    assert plotting.stack([]) == {}


def test_neighbouring_curves_differ_in_colour_and_dash():
    _, axes = plotting.figure()
    for i in range(len(plotting.PALETTE)):
        plotting.curve(axes[0, 0], [1, 2], [1.0, 2.0], str(i))
    lines = axes[0, 0].lines
    assert len({line.get_color() for line in lines}) == len(lines)
    assert len({str(line._dash_pattern) for line in lines}) == len(lines)
    colours = plotting.sequential(5)
    assert len(set(colours)) == 5


def test_gallery_puts_each_image_in_its_place():
    images = np.zeros((2, 4, 4))
    images[1] = 1.0
    fig = plotting.gallery({"samples": images, "nearest": images[:1, :, :, None]})
    ax = fig.axes[0]
    canvas = np.asarray(ax.images[0].get_array())
    assert canvas.shape == (9, 9, 3)
    assert (canvas[:4, :4] == 0).all()
    assert (canvas[:4, 5:] == 1).all()
    assert (canvas[5:, :4] == 0).all()
    assert (canvas[4] == 1).all()  # the gap, and the place of a missing image, are paper
    assert [text.get_text() for text in ax.texts] == ["samples", "nearest"]


def test_gallery_survives_nan_constant_and_colour_images(tmp_path):
    broken = np.full((1, 3, 3, 3), np.nan)
    fig = plotting.gallery({"nan": broken, "flat": np.full((2, 3, 3), 7.0)}, limits=(0.0, 1.0))
    canvas = np.asarray(fig.axes[0].images[0].get_array())
    assert (canvas[:3, :3] == 0.5).all()
    assert np.isfinite(canvas).all()
    assert plotting.save_figure(fig, tmp_path / "g", {"n": [1]})[0].read_bytes().startswith(PNG)
    plotting.gallery({"nan": broken})
    plotting.gallery({"flat": np.full((2, 3, 3), 7.0)})


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"a": np.zeros((0, 3, 3))},
        {"a": np.zeros((1, 3, 3)), "b": np.zeros((1, 4, 3))},
        {"a": np.zeros((3, 3))},
    ],
)
def test_gallery_refuses_what_is_no_set_of_images(rows):
    with pytest.raises(ValueError, match="gallery"):
        plotting.gallery(rows)
