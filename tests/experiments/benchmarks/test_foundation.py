import importlib.util
import json

import pytest

from experiments.benchmarks import foundation

SIZES = foundation.Sizes(
    width=16,
    blocks=1,
    batches=(8, 16),
    n=32,
    log_every=2,
    seeds=2,
    small_width=8,
    small_batch=8,
    repeats=1,
    seconds=0.01,
    samples=4,
    sampler_steps=2,
)


@pytest.mark.slow
def test_every_part_is_measured_and_written(tmp_path, capsys):
    output = tmp_path / "bench" / "foundation.json"
    assert foundation.main(SIZES, output) == 0
    rows = {line["name"]: line for line in json.loads(output.read_text())["rows"]}
    assert rows["matrix product, float32, 2048 x 2048"]["median"] > 0
    assert 0 < rows["  share of the matrix-product rate, batch 16"]["median"] < 100
    assert rows["2 seeds against one, width 8, batch 8"]["median"] > 0
    if importlib.util.find_spec("torch") is None:
        assert "pip install torch" in rows["against PyTorch"]["remark"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ["step time lost", "guard.nonfinite", str(output)])


def test_peer_is_the_same_network():
    pytest.importorskip("torch")
    rows = {line.name: line for line in foundation.against_torch(SIZES)}
    assert rows["largest difference of outputs for equal weights"].median < 1e-4
    assert rows["training step, batch 8: time / PyTorch's"].median > 0
