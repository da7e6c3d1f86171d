"""Counts the FLOPs of matrix products and convolutions in a jaxpr.

XLA's own count takes the body of a loop once whatever its length: far too low for scanned layers or
accumulated microbatches. Here a scan counts as often as it runs, and a shard_map on each of its devices.
Element-wise work is left out, as is usual for model FLOPs.
"""

import math
from typing import Any

from jax.extend import core


def count_flops(jaxpr: core.ClosedJaxpr) -> float:
    """Floating-point operations of one call, over all devices (a multiply-add is two).

    A `while` of unknown length counts once, a `cond` as its dearest branch.
    """
    return _count(jaxpr.jaxpr)


def _count(jaxpr: core.Jaxpr) -> float:
    return sum(_equation(equation) for equation in jaxpr.eqns)


def _equation(equation: core.JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    shapes: list[Any] = [
        getattr(variable.aval, "shape", ()) for variable in (*equation.invars, *equation.outvars)
    ]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(shapes[-1]) * math.prod(shapes[0][axis] for axis in contracted)
    if name == "conv_general_dilated":
        out_features = shapes[1][params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(shapes[-1]) * math.prod(shapes[1]) / out_features
    inner = [_count(jaxpr) for value in params.values() for jaxpr in _jaxprs(value)]
    if not inner:
        return 0.0
    if name == "cond":
        return max(inner)
    times = {"scan": lambda: params["length"], "shard_map": lambda: params["mesh"].size}
    return sum(inner) * times.get(name, lambda: 1)()


def _jaxprs(value: Any) -> list[core.Jaxpr]:
    if isinstance(value, core.ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, core.Jaxpr):
        return [value]
    return [jaxpr for item in value for jaxpr in _jaxprs(item)] if isinstance(value, tuple | list) else []
