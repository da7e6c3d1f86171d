"""The network of `diffusion_mem.denoisers` in PyTorch, its training step and sampler: a peer to time against.

PyTorch is no dependency; this file may be imported only where it is installed.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from diffusion_mem.process import Process
from diffusion_mem.sampler import ddim_timesteps

_TIME_FEATURES = 64


class ResidualMLP(nn.Module):
    """The same layers, with the parameters of a flax tree: (x_BxD, integer steps t_B) -> noise."""

    def __init__(self, params: Mapping[str, Any]):
        super().__init__()
        self.layers = nn.ModuleDict({name: _layer(values) for name, values in params.items()})
        self.blocks = sum(name.endswith("_up") for name in params)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        layer = self.layers
        temb = layer["time_out"](functional.silu(layer["time_in"](_time_features(t))))
        h = layer["stem"](x)
        for i in range(self.blocks):
            update = layer[f"block{i}_norm"](h) + layer[f"block{i}_time"](temb)
            h = h + layer[f"block{i}_down"](
                functional.gelu(layer[f"block{i}_up"](update), approximate="tanh")
            )
        return layer["head"](layer["head_norm"](h)) + layer["input_gain"](temb) * x


def _layer(values: Mapping[str, Any]) -> nn.Module:
    if "scale" in values:
        norm = nn.LayerNorm(len(values["scale"]), eps=1e-5)
        _set(norm.weight, values["scale"])
        _set(norm.bias, values["bias"])
        return norm
    dense = nn.Linear(*values["kernel"].shape)
    _set(dense.weight, np.asarray(values["kernel"]).T)
    _set(dense.bias, values["bias"])
    return dense


def _set(parameter: nn.Parameter, value: Any) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.array(value)))


def _time_features(t: torch.Tensor) -> torch.Tensor:
    half = _TIME_FEATURES // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half) / half)
    angles = t.float()[:, None] * frequencies
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


def stepper(network: ResidualMLP, process: Process, images: np.ndarray, lr: float) -> Callable[[int], float]:
    """Seconds per training step (noise, loss, gradients, fused Adam) on a resident batch, over so many."""
    x0 = torch.from_numpy(np.array(images.reshape(len(images), -1)))
    signal, sigma = (torch.from_numpy(np.array(table)) for table in (process.signal, process.sigma))
    optimizer = torch.optim.Adam(network.parameters(), lr=lr, fused=True)

    def step() -> torch.Tensor:
        t = torch.randint(1, process.num_steps, (len(x0),))
        noise = torch.randn_like(x0)
        predicted = network(signal[t, None] * x0 + sigma[t, None] * noise, t)
        loss = functional.mse_loss(predicted, noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    return run


def sampler(network: ResidualMLP, process: Process, num_steps: int) -> Callable[[np.ndarray], np.ndarray]:
    """DDIM from a given starting noise (B, D), as `diffusion_mem.sampler.ddim`."""
    steps = ddim_timesteps(process.num_steps, num_steps)
    signal, sigma = np.asarray(process.signal)[steps], np.asarray(process.sigma)[steps]
    after = zip([*signal[1:], 1.0], [*sigma[1:], 0.0], strict=True)
    levels = list(zip(steps.tolist(), signal.tolist(), sigma.tolist(), after, strict=True))

    def sample(x_init: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            x = torch.from_numpy(np.array(x_init))
            for t, signal_t, sigma_t, (signal_next, sigma_next) in levels:
                noise = network(x, torch.full((len(x),), t))
                x = float(signal_next) * (x - sigma_t * noise) / signal_t + float(sigma_next) * noise
            return x.numpy()

    return sample


def parameter_count(network: nn.Module) -> int:
    """Number of scalars."""
    return sum(parameter.numel() for parameter in network.parameters())


def noise(network: ResidualMLP, x: np.ndarray, t: int) -> np.ndarray:
    """The network's answer at one step for every row of `x`."""
    with torch.inference_mode():
        return network(torch.from_numpy(np.array(x)), torch.full((len(x),), t)).numpy()
