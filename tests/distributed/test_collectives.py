"""`torch.distributed` on backend ``xla`` between processes; what they run is in collective_bodies.py."""

from __future__ import annotations

import collective_bodies
import pytest

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


@pytest.mark.parametrize("device", ["xla", "cpu"])
@pytest.mark.parametrize("body", ["reductions", "movements", "point_to_point"])
def test_two_processes_get_what_the_host_computes(body: str, device: str) -> None:
    launcher.run(getattr(collective_bodies, body), (device,), 2)


def test_groups_of_some_processes_of_four() -> None:
    launcher.run(collective_bodies.groups, (), 4)
