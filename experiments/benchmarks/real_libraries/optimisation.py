"""Optimal transport, implicit layers, solvers: ott, optimistix, lineax, jaxopt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import random

from experiments.benchmarks.real_libraries.registry import Made, program

SIZE = 16


def _weight(seed: int, scale: float = 0.5) -> jax.Array:
    return scale * random.normal(random.key(seed), (SIZE, SIZE)) / SIZE**0.5


def _rows(seed: int, count: int = 32) -> jax.Array:
    return random.normal(random.key(seed), (count, SIZE))


@program("ott-jax", "Sinkhorn cost of embeddings")
def sinkhorn() -> Made:
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    x, y = _rows(1), _rows(2) + 0.5

    def loss(w):
        geometry = pointcloud.PointCloud(x @ w["x"], y @ w["y"], epsilon=0.1)
        return sinkhorn.Sinkhorn(max_iterations=200)(linear_problem.LinearProblem(geometry)).reg_ot_cost

    return loss, {"x": _weight(3, 1.0), "y": _weight(4, 1.0)}


@program("ott-jax", "Sinkhorn divergence")
def sinkhorn_divergence() -> Made:
    from ott.geometry import pointcloud
    from ott.tools import sinkhorn_divergence

    x, y = _rows(1), _rows(2) + 0.5

    def loss(w):
        return sinkhorn_divergence.sinkhorn_divergence(
            pointcloud.PointCloud, x @ w, y, epsilon=0.5, solve_kwargs={"max_iterations": 100}
        )[0]

    return loss, _weight(3, 1.0)


@program("ott-jax", "input-convex potential")
def convex_potential() -> Made:
    from ott.neural.networks import icnn

    x = _rows(1)
    model = icnn.ICNN(dim_data=SIZE, dim_hidden=[32, 32])
    params = model.init(random.key(0), x[0])
    return lambda params: jnp.mean(jax.vmap(lambda row: model.apply(params, row))(x)), params


@program("optimistix", "deep equilibrium by fixed point iteration")
def fixed_point() -> Made:
    import optimistix

    x = _rows(1)

    def loss(params):
        def layer(z, params):
            return jnp.tanh(z @ params["w"] + x @ params["u"])

        solver = optimistix.FixedPointIteration(rtol=1e-4, atol=1e-4)
        solution = optimistix.fixed_point(layer, solver, jnp.zeros_like(x), params, max_steps=200, throw=False)
        return jnp.mean(solution.value**2)

    return loss, {"w": _weight(2), "u": _weight(3, 1.0)}


@program("optimistix", "implicit layer by Newton's method")
def newton() -> Made:
    import optimistix

    x = _rows(1, 1)[0]

    def loss(params):
        def residual(z, params):
            return z - jnp.tanh(params["w"] @ z + params["u"] @ x)

        solver = optimistix.Newton(rtol=1e-4, atol=1e-4)
        solution = optimistix.root_find(residual, solver, jnp.zeros(SIZE), params, max_steps=50, throw=False)
        return jnp.mean(solution.value**2)

    return loss, {"w": _weight(2), "u": _weight(3, 1.0)}


@program("optimistix", "least squares by Levenberg-Marquardt")
def levenberg_marquardt() -> Made:
    import optimistix

    x, y = _rows(1), _rows(2)[:, 0]

    def loss(params):
        def residual(v, params):
            return jnp.concatenate([jnp.tanh(x @ params) @ v - y, 0.1 * v])

        solver = optimistix.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
        solution = optimistix.least_squares(residual, solver, jnp.zeros(SIZE), params, max_steps=50, throw=False)
        return jnp.mean(solution.value**2)

    return loss, _weight(3, 1.0)


@program("optimistix", "inner minimisation by BFGS")
def bfgs() -> Made:
    import optimistix

    x, y = _rows(1), _rows(2)[:, 0]

    def loss(params):
        def objective(v, params):
            return jnp.mean((jnp.tanh(x @ params) @ v - y) ** 2) + 0.05 * jnp.sum(v**2)

        solver = optimistix.BFGS(rtol=1e-4, atol=1e-4)
        solution = optimistix.minimise(objective, solver, jnp.zeros(SIZE), params, max_steps=100, throw=False)
        return jnp.mean(solution.value**2)

    return loss, _weight(3, 1.0)


@program("lineax", "linear solve by LU")
def lu_solve() -> Made:
    import lineax

    b = _rows(1, 1)[0]

    def loss(w):
        operator = lineax.MatrixLinearOperator(jnp.eye(SIZE) + w @ w.T)
        return jnp.sum(lineax.linear_solve(operator, b, lineax.LU()).value ** 2)

    return loss, _weight(2)


@program("lineax", "linear solve by conjugate gradients")
def conjugate_gradients() -> Made:
    import lineax

    b = _rows(1, 1)[0]

    def loss(w):
        def apply(v):
            return v + w @ (w.T @ v)

        operator = lineax.FunctionLinearOperator(apply, jax.eval_shape(lambda: b), lineax.positive_semidefinite_tag)
        solver = lineax.CG(rtol=1e-4, atol=1e-4)
        return jnp.sum(lineax.linear_solve(operator, b, solver, throw=False).value ** 2)

    return loss, _weight(2)


@program("jaxopt", "deep equilibrium by Anderson acceleration")
def anderson() -> Made:
    import jaxopt

    x = _rows(1)

    def loss(params):
        def layer(z, params):
            return jnp.tanh(z @ params["w"] + x @ params["u"])

        solver = jaxopt.AndersonAcceleration(layer, maxiter=50, tol=1e-4, history_size=5)
        return jnp.mean(solver.run(jnp.zeros_like(x), params).params ** 2)

    return loss, {"w": _weight(2), "u": _weight(3, 1.0)}


@program("jaxopt", "ridge regression, differentiated by its regularisation")
def ridge() -> Made:
    import jaxopt

    x, y = _rows(1), _rows(2)[:, 0]

    def loss(params):
        def objective(v, strength):
            return jnp.mean((x @ v - y) ** 2) + jnp.sum(jnp.exp(strength) * v**2)

        solver = jaxopt.LBFGS(objective, maxiter=50, tol=1e-5)
        return jnp.mean((_rows(4) @ solver.run(jnp.zeros(SIZE), params).params - _rows(5)[:, 0]) ** 2)

    return loss, jnp.full(SIZE, -1.0)
