"""On a GPU the trial of operations (`zero_mpi.ops.trial`) uses the GPU's operations."""

from zero_mpi import device, ops
from zero_mpi.ops import trial


def test_a_trial_on_a_gpu_repeats_and_sees_the_gpus_operations(gpu, monkeypatch):
    first = trial.digest()
    assert trial.digest() == first
    inputs = []
    monkeypatch.setattr(ops, "gelu", lambda x: (inputs.append(x), x)[1])
    assert trial.digest() != first
    assert all(device.is_cupy(x) for x in inputs)
    assert inputs
