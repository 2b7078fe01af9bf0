"""`torch.distributions`: samples, densities, gradients and divergences, in one graph for all steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributions as dist
from torch.distributions import Distribution, transforms

import torch_xla

Make = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Distribution]
# From a location, positive numbers, probabilities and a covariance.
MAKE: dict[str, Make] = {
    "bernoulli": lambda m, s, p, c: dist.Bernoulli(p),
    "binomial": lambda m, s, p, c: dist.Binomial(5, p),
    "categorical": lambda m, s, p, c: dist.Categorical(logits=m),
    "dirichlet": lambda m, s, p, c: dist.Dirichlet(s),
    "exponential": lambda m, s, p, c: dist.Exponential(s),
    "gamma": lambda m, s, p, c: dist.Gamma(s, s),
    "geometric": lambda m, s, p, c: dist.Geometric(p),
    "gumbel": lambda m, s, p, c: dist.Gumbel(m, s),
    "independent": lambda m, s, p, c: dist.Independent(dist.Normal(m, s), 1),
    "laplace": lambda m, s, p, c: dist.Laplace(m, s),
    "mixture": lambda m, s, p, c: dist.MixtureSameFamily(dist.Categorical(p), dist.Normal(m, s)),
    "multivariate normal": lambda m, s, p, c: dist.MultivariateNormal(m, c),
    "normal": lambda m, s, p, c: dist.Normal(m, s),
    "poisson": lambda m, s, p, c: dist.Poisson(s),
    "transformed": lambda m, s, p, c: dist.TransformedDistribution(dist.Normal(m, s), [transforms.SigmoidTransform()]),
    "uniform": lambda m, s, p, c: dist.Uniform(m, m + s),
}


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """No checks of arguments: each of them reads a value."""
    Distribution.set_default_validate_args(False)
    yield
    Distribution.set_default_validate_args(__debug__)


def arguments(device: str) -> list[torch.Tensor]:
    values = [[0.1, -0.3, 0.7], [0.5, 1.5, 2.5], [0.2, 0.5, 0.3]]
    return [*(torch.tensor(v).to(device) for v in values), (torch.eye(3) + 0.2).to(device)]


@pytest.mark.compiled("torch.distributions checks its arguments by reading, which compiles nothing in use", reads=False)
@pytest.mark.costs("programs of some hundred operators")
def test_all_in_one_graph(compiles: Callable[..., AbstractContextManager[Any]]) -> None:
    given = [t.requires_grad_() for t in arguments("xla")]
    torch_xla.sync()
    drawn = []
    with compiles(1):
        for _ in range(3):
            samples, densities = {}, {}
            for name, make in MAKE.items():
                made = make(*given)
                samples[name] = made.rsample() if made.has_rsample else made.sample()
                densities[name] = made.log_prob(samples[name].detach())
            reparametrised = [s for s in samples.values() if s.requires_grad]
            grads = torch.autograd.grad(sum(s.sum() for s in reparametrised), given[:2])
            torch_xla.sync()
            drawn.append(samples["normal"].tolist())
    assert len({tuple(numbers) for numbers in drawn}) == 3
    assert len(reparametrised) > 7 and all(g.isfinite().all() and g.all() for g in grads)
    for name, make in MAKE.items():
        expected = make(*arguments("cpu")).log_prob(samples[name].detach().cpu())
        torch.testing.assert_close(densities[name].detach().cpu(), expected, rtol=1e-3, atol=1e-3, msg=name)


def test_moments() -> None:
    names = ("gamma", "laplace", "poisson", "binomial")
    means = [MAKE[name](*arguments("xla")).sample(torch.Size([4000])).mean(0) for name in names]
    torch_xla.sync()
    for name, mean in zip(names, means, strict=True):
        expected = MAKE[name](*arguments("cpu"))
        error = (mean.cpu() - expected.mean).abs() / (expected.variance / 4000).sqrt()
        assert error.max() < 5, name


def test_divergences() -> None:
    compared = 0
    for one, other in itertools.product(MAKE, MAKE):
        try:
            expected = dist.kl_divergence(MAKE[one](*arguments("cpu")), MAKE[other](*arguments("cpu")))
        except (NotImplementedError, ValueError):
            continue  # PyTorch has no formula for the two
        ours = dist.kl_divergence(MAKE[one](*arguments("xla")), MAKE[other](*arguments("xla")))
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-3, atol=1e-3, msg=f"{one} {other}")
        compared += 1
    assert compared > 20


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="Expected parameter scale"):
        dist.Normal(torch.zeros(2, device="xla"), torch.tensor([1.0, -1.0]).to("xla"), validate_args=True)
