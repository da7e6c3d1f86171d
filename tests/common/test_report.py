import html.parser
import io
import json
import math
import pathlib

import pytest
from ml_collections import ConfigDict

from common import config as config_lib
from common import plotting, report
from common.report import Report, run_report
from common.verdict import Claim, Verdict, overall
from common.writer import Writer

ATTACK = "<script>alert('x')</script>&\"><img src=x onerror=alert(1)>"


class _Page(html.parser.HTMLParser):
    """Tags, attributes and visible text of a page; fails on a tag closed out of order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.strip())


def _claim(verdict, measured=1.0, interval=(0.9, 1.1)):
    return Claim("the slope is one", "1", measured, interval, 5, verdict)


def _image(folder):
    fig, axes = plotting.figure()
    return plotting.save_figure(
        fig, folder / "figures" / "a b#1", plotting.curve(axes[0, 0], [1, 2], [3.0, 4.0], "c")
    )[0]


def test_everything_given_is_escaped(tmp_path):
    image = _image(tmp_path)
    page = Report(ATTACK, ATTACK).heading(ATTACK).text(ATTACK).figure(image, ATTACK)
    page.table([ATTACK, "b"], [[ATTACK, pathlib.Path(ATTACK)], [[ATTACK], {ATTACK: 1}]], ATTACK)
    page.verdict([Claim(ATTACK, ATTACK, ATTACK, None, 1, Verdict.REPRODUCED)])
    parsed = _Page(page.render(tmp_path))
    assert "script" not in parsed.tags
    assert parsed.tags.count("img") == 1
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert parsed.text.count(ATTACK) >= 8


def test_a_page_stands_alone_and_links_to_its_files(tmp_path):
    path = Report("title").figure(_image(tmp_path), "caption").write(tmp_path / "report.html")
    parsed = _Page(path.read_text())
    sources = [value for name, value in parsed.attributes if name in ("src", "href")]
    assert sources[0].startswith("data:image/png;base64,iVBOR")
    assert sources[1:] == ["figures/a%20b%231.csv", "figures/a%20b%231.svg"]
    assert "http:" not in path.read_text()
    assert "https:" not in path.read_text()
    assert "link" not in parsed.tags


def test_a_reader_never_sees_half_a_page(tmp_path, monkeypatch):
    path = Report("old").write(tmp_path / "sub" / "report.html")
    monkeypatch.setattr(pathlib.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Report("new").write(path)
    assert "<h1>old</h1>" in path.read_text()


def test_the_same_content_gives_the_same_page(tmp_path):
    image = _image(tmp_path)
    pages = [
        Report("t").figure(image, "c").verdict([_claim(Verdict.TREND_ONLY)]).render(tmp_path)
        for _ in range(2)
    ]
    assert pages[0] == pages[1]


def test_the_overall_verdict_is_the_worst_that_was_run():
    assert overall([]) == Verdict.NOT_RUN
    assert overall([_claim(Verdict.NOT_RUN)]) == Verdict.NOT_RUN
    assert overall([_claim(Verdict.REPRODUCED), _claim(Verdict.NOT_RUN)]) == Verdict.REPRODUCED
    assert overall([_claim(Verdict.REPRODUCED), _claim(Verdict.TREND_ONLY)]) == Verdict.TREND_ONLY
    assert overall([_claim(verdict) for verdict in Verdict]) == Verdict.NOT_REPRODUCED


def test_verdict_names_are_the_ones_shown():
    assert [str(verdict) for verdict in Verdict] == [
        "reproduced",
        "trend only",
        "not reproduced",
        "not run at this scale",
    ]


def test_a_verdict_shows_measured_beside_paper():
    claims = [_claim(Verdict.REPRODUCED, 1.23456), _claim(Verdict.NOT_RUN, None, None)]
    claims += [_claim(Verdict.NOT_REPRODUCED, math.nan, (math.nan, math.nan))]
    text = _Page(Report("t").verdict(claims).render()).text
    assert "✗ Not reproduced" in text
    assert "Claims: 1 reproduced, 1 not reproduced, 1 not run at this scale" in text
    assert "1.23" in text
    assert "0.9\u00a0to\u00a01.1" in text
    assert "✓ reproduced" in text
    assert "nan" not in " ".join(text)
    assert "nothing was claimed" in Report("t").verdict([]).render()


def test_cells():
    rows = [[1_234_567, 0.123456, None, True, "a"], [2, math.nan, None, False, ["b", 3.0]]]
    parsed = _Page(Report("t").table("ijklm", rows).render())
    for shown in ("1,234,567", "0.1235", "–", "True", "b, 3"):
        assert shown in parsed.text
    assert parsed.attributes.count(("class", "number")) == 3 * 3  # two numeric columns and the empty one
    assert "none" in _Page(Report("t").table(["a"], []).render()).text
    with pytest.raises(ValueError, match="needs 2 cells"):
        Report("t").table(["a", "b"], [["only one"]])


def _run(folder, rows=(), events=()):
    config = ConfigDict({"optim": {"lr": 0.5}, "run": {"steps": 30}})
    folder.mkdir()
    content = {"config": json.loads(config_lib.to_json(config))}
    content["environment"] = {"git": "abc+", "device": ATTACK, "versions": {"jax": "0.10.2"}}
    (folder / "config.json").write_text(json.dumps(content))
    with Writer(folder, stream=io.StringIO()) as writer:
        for step, values, kind in rows:
            writer.log(step, values, kind)
        for step, name, message in events:
            writer.event(step, name, message)
    return config


def test_a_run_report_shows_curves_changes_events_and_environment(tmp_path):
    rows = [
        (s, {"loss": [1 / s, 2 / s], "bad": math.nan, "hist": {"counts": [1]}}, "train")
        for s in (1, 10, 1000)
    ]
    rows += [(10, {"fid/value": 3.5}, "eval")]
    config = _run(tmp_path / "run", rows, [(7, "alert", ATTACK)])
    defaults = config.copy_and_resolve_references()
    defaults.optim.lr = 0.1
    (tmp_path / "run" / "DONE").write_text("{}")
    parsed = _Page(run_report(tmp_path / "run", defaults).read_text())
    for shown in (
        "finished · step 1,000 · 1 attempt",
        "eval fid/value",
        "3.5",
        "optim.lr: 0.1 → 0.5",
        ATTACK,
    ):
        assert shown in parsed.text
    for shown in ("alert", "abc+", "0.10.2", "run.steps", "30", "0.001, 0.002"):
        assert shown in parsed.text
    assert "train bad" not in parsed.text
    table = (tmp_path / "run" / "figures" / "metrics.csv").read_text()
    assert "train loss,1000.0,0.0015" in table
    assert "hist" not in table


def test_an_empty_or_foreign_folder_still_has_a_report(tmp_path):
    _run(tmp_path / "empty")
    text = _Page(run_report(tmp_path / "empty").read_text()).text
    assert "No metrics were written." in text
    assert "not finished · step 0 · 0 attempts" in text
    (tmp_path / "foreign").mkdir()
    shown = " ".join(_Page(run_report(tmp_path / "foreign").read_text()).text)
    assert "config.json: not a run's config" in shown


def test_a_run_with_very_many_metrics_says_what_is_not_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MAX_PANELS", 2)
    _run(tmp_path / "run", [(1, {f"m{i}": float(i) for i in range(5)}, "train")])
    assert "The first 2 of 5 are drawn." in run_report(tmp_path / "run").read_text()


def test_seeds_may_differ_between_rows(tmp_path):
    _run(
        tmp_path / "run",
        [(1, {"x": [1.0, 2.0]}, "train"), (2, {"x": 3.0}, "train"), (3, {"x": [math.nan, 1.0]}, "train")],
    )
    run_report(tmp_path / "run")
    lines = (tmp_path / "run" / "figures" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[2] for line in lines[1:]] == ["1.5", "3.0", "1.0"]
