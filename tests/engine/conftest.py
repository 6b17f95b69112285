"""Fixtures of the engine's tests."""

import pytest

pytest.register_assert_rewrite("simulator_rig", "suite_device")


@pytest.fixture
def make_rig():
    """Makes simulator rigs and closes their engines; the seed is printed, to repeat a failure."""
    from kvferry.engine.devices.simulation import RandomChooser, Simulation
    from simulator_rig import Rig

    rigs: list[Rig] = []

    def make(seed: int = 0, *, simulation=None, **options) -> Rig:
        print(f"seed {seed}")
        rig = Rig(simulation or Simulation(RandomChooser(seed)), **options)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.engine.close()
