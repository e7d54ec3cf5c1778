"""Training steps with a preference loss or a teacher, on data with the sizes that a plan assumes."""

import numpy as np

from zero_mpi.data.documents import Document, stream_of
from zero_mpi.data.loader import HeldOut, StepLoader, Windows
from zero_mpi.data.packing import PairWindows
from zero_mpi.data.teacher_file import TeacherFile
from zero_mpi.models.lora import FROZEN, LoRA
from zero_mpi.nn.loss import Distilled
from zero_mpi.nn.preference import Preference
from zero_mpi.train.objective import Objective, PreferenceObjective

LOSSES = {
    name: {"lora": LoRA(5, 7.0), "frozen": FROZEN, "packed": True, "preference": Preference(name)}
    | {"base_is_reference": True}
    for name in ("dpo", "orpo", "kto")
} | {"teacher": {"teacher": True}}


class Taught(Objective):
    """Objective with a teacher's loss, whose records are made in memory."""

    def micro(self, number, scale, i):
        batch = self.loader.micro(number, i)
        records = np.zeros(batch.targets.size, TeacherFile(3, 1.0, 0, 9, "", "").record)
        records["logp"] = records["rest"] = -1.0
        return batch.inputs, Distilled(batch.targets, scale, records, 0.5, 1.0, self.loader.windows.vocab)


def objective_of(case, module):
    rng, ids, half = np.random.default_rng(0), case.model.vocab_size, case.context // 2 + 1
    sizes = {"batch_size": case.batch_size, "micro_batch": case.micro_batch, "seed": 0}
    if case.teacher:
        windows = Windows(rng.integers(ids, size=case.context * case.batch_size + 1), case.context)
        windows.vocab = ids
        return Taught(module, StepLoader(windows, **sizes))
    prompt = 1 + half // 2 * case.preference.learns_prompts
    mask, ends = np.tile(np.arange(half) >= prompt, 2), np.array([half, 2 * half])
    pairs = [Document(str(n), rng.integers(ids, size=2 * half), b"", mask, ends) for n in range(9)]
    loader = StepLoader(PairWindows(stream_of(pairs), case.context), **sizes)
    return PreferenceObjective(module, loader, HeldOut({}), case.preference, case.base_is_reference)


def make_step(objective, accumulator, optimizer):
    losses = objective.step(0)
    for number in accumulator:
        x, loss = (None, None) if number is None else losses.micro(number)
        accumulator.accumulate(x, loss)
    accumulator.totals(*losses.sums)
    optimizer.step(max_norm=1.0)
