import jax

from common.mesh import ParallelConfig, make_mesh
from common.profile import count_parameters
from common.start import run_key
from experiments import plan, reproduce
from experiments.tasks import build

FIGURE = "diffusion_mem/fig2_memorization_window"


def test_cost_is_that_of_the_networks_layers():
    """Per seed and example: forward, and twice that for gradients, except those with respect to inputs."""
    _, config = reproduce.configs(reproduce.load_figure(FIGURE), "tiny", 2)[0]
    cost = plan.cost_of(config)
    state = jax.eval_shape(build(config, make_mesh(ParallelConfig())).init, run_key(config.run))
    assert cost.parameters == count_parameters(state.params)
    width, pixels, time = 32, 64, 64
    hidden = 2 * width * width + width * width  # up, down and time of the one block
    inputs = time * width + pixels * width  # no gradient with respect to time features and pixels
    outputs = 2 * pixels * width
    multiply_adds = 3 * (hidden + width * width + outputs) + 2 * inputs
    assert cost.flops == 2 * multiply_adds * 16 * config.run.num_seeds
    assert cost.memory > 0


def test_plan_lists_every_run_with_its_numbers(capsys, monkeypatch):
    monkeypatch.setattr(plan.profile, "matmul_rate", lambda: 1e9)
    variants = reproduce.configs(reproduce.load_figure(FIGURE), "tiny", 1)
    plan.show([(variant.name, config) for variant, config in variants])
    out = capsys.readouterr().out
    for variant, config in variants:
        line = next(line for line in out.splitlines() if variant.name in line)
        assert f"{plan.cost_of(config).parameters // config.run.num_seeds:,}" in line
        assert f" {config.run.steps} " in line
    assert "8 GFLOP/s" in out  # 8 devices
    assert "…" not in out
    for heading in ("parameters", "FLOP", "GiB", "minutes"):
        assert heading in out
