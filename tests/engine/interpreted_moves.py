"""Run by ``test_cuda_interpreted.py`` in a process of its own, with Triton's interpreter.

The same moves twice: with the kernels as the CUDA device launches them, and with their references.
"""

import torch
from kvferry.engine.devices import simulated
from kvferry.engine.devices.runtime import KernelLaunch
from kvferry.engine.devices.simulation import RandomChooser, Simulation
from kvferry.engine.strategy import Method
from kvferry.engine.transfer import TransferOptions
from simulator_rig import Rig


class Launching(simulated.SimulatedRuntime):
    """Runs the kernels themselves, and counts them."""

    num_launched = 0

    def launch(self, stream, kernel):
        def run():
            kernel.run()
            Launching.num_launched += 1

        super().launch(stream, KernelLaunch(kernel.name, kernel.run, run, kernel.accesses))


def there_and_back(method: Method, integrity: str):
    """Store, load elsewhere, and load a chunk with a flipped bit; everything that can be seen."""
    rig = Rig(
        Simulation(RandomChooser(3)),
        method=method,
        page_bytes=80,
        staging_blocks=2,
        options=TransferOptions(integrity=integrity),
    )
    generator = torch.Generator().manual_seed(3)
    for layer in rig.cache.layers:
        layer.copy_(torch.randint(256, layer.shape, generator=generator))
    rig.store(1, [3, 0, -1, 5, 1, 2], [6, 0, 1])
    rig.finish()
    rig.engine.mark_loads()
    rig.load(2, [8, 9, -1, 11, 12, 13], [6, 0, 1])
    rig.finish()
    rig.arena.slots[6 * rig.arena.slot_stride_bytes + 7] ^= 1
    rig.load(3, [14, 15], [6])
    errors = rig.finish()
    rig.simulation.check()
    blocks = [rig.cache.block(block) for block in range(16)]
    seen = (errors, blocks, rig.arena.slots.clone(), rig.arena.checksums.clone())
    rig.engine.close()
    return seen


def main() -> None:
    import simulator_rig

    for method in (Method.ZERO_COPY, Method.PACKED, Method.COPY_ENGINE):
        for integrity in ("full", "off"):
            simulator_rig.SimulatedRuntime = Launching
            launched = there_and_back(method, integrity)
            simulator_rig.SimulatedRuntime = simulated.SimulatedRuntime
            plain = there_and_back(method, integrity)
            assert launched[0] == plain[0], (method, integrity, launched[0])
            assert all(map(torch.equal, launched[1], plain[1])), (method, integrity)
            assert torch.equal(launched[2], plain[2]), (method, integrity)
            assert torch.equal(launched[3], plain[3]), (method, integrity)
            assert (launched[0][3] is None) == (integrity == "off"), launched[0]
            assert launched[0][1] is None
            assert launched[0][2] is None
    assert Launching.num_launched > 15
    print(f"launched {Launching.num_launched} kernels")


if __name__ == "__main__":
    main()
